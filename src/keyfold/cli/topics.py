"""`keyfold topics`: messages, those who read them, and those that were set aside."""

import base64
from collections.abc import Iterator
from typing import Annotated

import typer
from msgspec import Struct

from keyfold.cli import tail as reading
from keyfold.cli.overview import ConsumerState, overview
from keyfold.cli.session import WrongUsage, actor, session_of
from keyfold.cli.signals import stop_on_signals
from keyfold.core import deadletters, replay
from keyfold.core.answer import Answer, printable
from keyfold.core.context import Context
from keyfold.core.errors import BadInput
from keyfold.core.times import iso, moment_us
from keyfold.core.workers import consumer_named

app = typer.Typer(no_args_is_help=True, help="Topics: their messages, who reads them, and what was set aside.")

LETTERS_MAX = 1000

TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="`keyfold topics list` shows them")]
FromPosition = Annotated[int | None, typer.Option(min=0, metavar="N", help="Begin at this position.")]
FromTime = Annotated[str | None, typer.Option(metavar="TIME", help="Begin here: 2026-11-15T20:30:00Z, -2h, '2h ago'.")]
Partition = Annotated[int | None, typer.Option(min=0, metavar="P", help="This partition only.")]


class ShownLetter(Struct, frozen=True):
    consumer: str
    topic: str
    partition: int
    position: int
    key: str
    version: int
    state: str
    tries: int
    set_aside_at: str
    reason: str
    payload_base64: str


class Redriven(Struct, frozen=True):
    consumer: str
    applied: int
    failed: list[ShownLetter]


@app.command("list")
def list_topics(ctx: typer.Context) -> Answer:
    """List the topics.

    For each: what it keeps, what waits to be published, and how far its consumers are behind.
    """
    states = overview(session_of(ctx).product(make=False))
    rows = [
        {
            "topic": state.topic,
            "partitions": len(state.partitions),
            "kept": state.kept,
            "published": sum(partition.next for partition in state.partitions),
            "pending": state.pending,
            "oldest_pending": f"{state.oldest_pending_seconds:.0f} s" if state.pending else "",
            "consumers": ", ".join(map(_summary, state.consumers)) or "none here",
        }
        for state in states
    ]
    return Answer(data=states, table=rows)


@app.command()
def tail(
    ctx: typer.Context,
    topic: TopicName,
    from_position: FromPosition = None,
    from_time: FromTime = None,
    last: Annotated[int | None, typer.Option(min=0, metavar="N", help="The last N messages; 10 if not said.")] = None,
    partition: Partition = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as messages come, until Ctrl-C.")] = False,
) -> Iterator[Answer]:
    """Print messages, one a line.

    A line has partition/position, event time, key, version, schema and payload.
    """
    if sum(given is not None for given in (from_position, from_time, last)) > 1:
        raise WrongUsage("--from-position, --from-time and --last exclude each other")
    context = session_of(ctx).product(make=False)
    source = context.topics.source(topic)
    starts = dict.fromkeys(_partitions(context, topic, partition), 0)
    for each in starts:
        if from_time is not None:
            starts[each] = source.position_at(each, moment_us(from_time, _now_us(context)))
        elif from_position is not None:
            starts[each] = max(from_position, source.bounds(each).first)
    is_last = from_position is None and from_time is None
    first = reading.last(source, starts, 10 if last is None else last) if is_last else reading.until_now(source, starts)
    for record in first:
        yield Answer(data=reading.shown(record), lines=[reading.line(record)])
    if follow:
        # Noted, not raised: an interrupt inside a look at the store would leave a torn connection and a traceback.
        for record in reading.from_now_on(source, starts, stop_on_signals()):
            yield Answer(data=reading.shown(record), lines=[reading.line(record)])
        raise KeyboardInterrupt


@app.command(name="replay")
def replay_topic(
    ctx: typer.Context,
    topic: TopicName,
    from_position: FromPosition = None,
    from_time: FromTime = None,
    partition: Partition = None,
    consumer: Annotated[str | None, typer.Option(metavar="NAME", help="Set this consumer back.")] = None,
) -> Answer:
    """Let messages be read again from a place on.

    With --consumer its position is set back; it applies what is newer and drops the rest. Without it the kept
    messages are published to Kafka once more; an embedded topic needs no such thing.
    """
    if (from_position is None) == (from_time is None):
        raise WrongUsage("say where to begin: --from-position N or --from-time TIME, one of them")
    session = session_of(ctx)
    context = session.product(make=False)
    time_us = None if from_time is None else moment_us(from_time, _now_us(context))
    start = replay.Start(position=from_position, time_us=time_us, partition=partition)
    if consumer is None:
        with session.steps("Sending again", len(_partitions(context, topic, partition))) as steps:
            sent = replay.send_again(
                context, topic, start, actor=actor(), report=lambda done: steps.step(f"partition {done.partition}")
            )
        total = sum(each.messages for each in sent)
        return Answer(data=sent, lines=[f"{total} messages of {topic} were sent again."])
    known = consumer_named(context, consumer)
    if known.topic != topic:
        raise BadInput(f"{consumer} reads {known.topic}, not {topic}")
    moved = replay.set_back(context, known, start, actor=actor())
    again = sum(each.before - each.after for each in moved)
    return Answer(data=moved, table=_fields(moved), lines=[f"{consumer} reads {again} messages of {topic} again."])


@app.command()
def dead(
    ctx: typer.Context,
    consumer: Annotated[str | None, typer.Option(metavar="NAME", help="Of this consumer only.")] = None,
) -> Answer:
    """List the messages that were set aside.

    A dead one could not be applied; a parked one waits behind an earlier message of its key.
    """
    context = session_of(ctx).product(make=False)
    letters = [_shown(each) for each in context.store.read(lambda tx: deadletters.listed(tx, consumer, LETTERS_MAX))]
    if not letters:
        return Answer(data=letters, notes=["No message is set aside."])
    names = ("consumer", "topic", "partition", "position", "key", "version", "state", "tries", "set_aside_at", "reason")
    notes = [f"These are the oldest {LETTERS_MAX}; there may be more."] if len(letters) == LETTERS_MAX else []
    return Answer(data=letters, table=[{name: getattr(each, name) for name in names} for each in letters], notes=notes)


@app.command()
def redrive(
    ctx: typer.Context,
    consumer: Annotated[str, typer.Argument(metavar="CONSUMER")],
    key: Annotated[str | None, typer.Option(metavar="K", help="Messages of this key only.")] = None,
) -> Answer:
    """Apply what was set aside, in order.

    The exit code is 1 if some failed again.
    """
    context = session_of(ctx).product(make=False)
    known = consumer_named(context, consumer)
    done = deadletters.redrive(context.store, known.name, known.topic, known.apply, ordered=known.ordered, key=key)
    data = Redriven(consumer, done.applied, [_shown(letter) for letter in done.failed])
    lines = [f"{done.applied} applied, {len(done.failed)} failed again."]
    lines.extend(f"  {each.topic}/{each.partition}/{each.position} {each.key}: {each.reason}" for each in data.failed)
    return Answer(data=data, lines=[printable(each) for each in lines], exit_code=1 if done.failed else 0)


@app.command()
def discard(
    ctx: typer.Context,
    consumer: Annotated[str, typer.Argument(metavar="CONSUMER")],
    topic: TopicName,
    partition: Annotated[int, typer.Argument(metavar="PARTITION")],
    position: Annotated[int, typer.Argument(metavar="POSITION")],
    yes: Annotated[bool, typer.Option("--yes", help="Yes, for good.")] = False,
) -> Answer:
    """Let go of a message that was set aside.

    It is lost for good; an audit record stays.
    """
    if not yes:
        raise WrongUsage(f"{topic}/{partition}/{position} would be lost for good", hint="If that is meant, add --yes")
    context = session_of(ctx).product(make=False)
    deadletters.discard(context.store, consumer, topic, partition, position, actor=actor())
    place = {"consumer": consumer, "topic": topic, "partition": partition, "position": position}
    return Answer(data={"discarded": place}, lines=[f"{topic}/{partition}/{position} of {consumer} is discarded."])


def _summary(consumer: ConsumerState) -> str:
    aside = f", {consumer.dead} dead, {consumer.parked} parked" if consumer.dead or consumer.parked else ""
    return f"{consumer.name}: lag {consumer.lag}{aside}"


def _partitions(context: Context, topic: str, partition: int | None) -> list[int]:
    count = context.topics.partitions(topic)
    if partition is None:
        return list(range(count))
    if partition >= count:
        raise BadInput(f"{topic} has no partition {partition}", hint=f"It has 0 to {count - 1}")
    return [partition]


def _now_us(context: Context) -> int:
    return context.store.read(lambda tx: tx.now_us)


def _shown(letter: deadletters.DeadLetter) -> ShownLetter:
    return ShownLetter(
        letter.consumer,
        letter.topic,
        letter.partition,
        letter.position,
        letter.key,
        letter.version,
        letter.state,
        letter.tries,
        iso(letter.set_aside_at_us),
        letter.reason,
        base64.b64encode(letter.payload).decode(),
    )


def _fields(moved: list[replay.SetBack]) -> list[dict[str, object]]:
    return [{"partition": each.partition, "stood_at": each.before, "reads_from": each.after} for each in moved]
