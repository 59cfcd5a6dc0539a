"""The command line as a person or a script meets it: real processes, real stores."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
import typer

from keyfold import __version__
from keyfold.cli.overview import overview
from keyfold.cli.root import root
from keyfold.core import outbox
from keyfold.core.access import client_of
from keyfold.core.context import Context
from keyfold.core.errors import BadInput, Unauthenticated
from keyfold.core.relay import Relay
from keyfold.core.settings import load
from keyfold.core.store import Store
from keyfold.core.tables import AUDIT, LEASES, MEMBERS, MESSAGES
from keyfold.core.times import moment_us, span_seconds
from keyfold.core.topics.topic import Message, partition_of
from keyfold.counters.compile import EXAMPLE
from keyfold.parts import PARTS, settings_of_parts
from tests.servers.kafka import KafkaServer
from tests.stores import made_ready as make_schema

KEYFOLD = Path(sys.executable).with_name("keyfold")
LISTINGS_TOPICS = ("offers", "photo-requests", "photo-answers", "moderation-opinions")
Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Ours, without settings and with a place for bytecode, so that the fortieth process starts faster."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KEYFOLD_", "PYTHONDONT"))}
    return {**kept, "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("bytecode")), "COLUMNS": "100"}


class Terminal:
    """Runs commands in an empty directory of its own."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self._environment = environment

    def __call__(self, *arguments: str | bytes, **variables: str) -> Run:
        """Run to the end. Whatever happens, nobody is shown a traceback."""
        done = subprocess.run(
            [KEYFOLD, *arguments],
            cwd=self.directory,
            env={**self._environment, **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "Traceback" not in done.stderr or variables.get("KEYFOLD_LOG_LEVEL") == "debug", done.stderr
        return done

    def answer(self, *arguments: str, **variables: str) -> object:
        """What a command answers to a program."""
        done = self(*arguments, "--json", **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    @contextmanager
    def running(self, *arguments: str, **variables: str) -> Iterator["subprocess.Popen[str]"]:
        """A command that goes on until it is told to stop."""
        process = subprocess.Popen(
            [KEYFOLD, *arguments],
            cwd=self.directory,
            env={**self._environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def python(self, code: str, **variables: str) -> Run:
        """A small program of ours, for what no command line can bring about."""
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.directory,
            env={**self._environment, **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def keyfold(tmp_path: Path, environment: dict[str, str]) -> Terminal:
    return Terminal(tmp_path, environment)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of each kind, named as a user names it, not upgraded."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'other.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def ready(url: str) -> str:
    """A store of each kind with our schema."""
    return made_ready(url)


@pytest.fixture
def ready_file(tmp_path: Path) -> str:
    """The store that commands find without being told: keyfold.db in their directory."""
    return made_ready(f"sqlite:///{tmp_path / 'keyfold.db'}")


def made_ready(url: str) -> str:
    store = Store.open(url)
    make_schema(store)
    store.close()
    return url


@contextmanager
def product(url: str) -> Iterator[Context]:
    """The same store, opened by the test itself."""
    context = Context.open(load(parts=settings_of_parts(), environ={}, options={"store.url": url}), PARTS)
    try:
        yield context
    finally:
        context.close()


def refused(done: Run, *words: str, code: int = 1) -> str:
    """The one line of an error."""
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("keyfold: ")
    for word in words:
        assert word in line
    return line


def commands() -> dict[tuple[str, ...], "typer.core.TyperCommand"]:
    """Every command that can be called, by its path."""
    group = root()
    context = typer.Context(group)
    found = {}
    for name in group.list_commands(context):
        _, command, _ = group.resolve_command(context, [name])
        subcommands = getattr(command, "commands", None)
        if subcommands is None:
            found[(name,)] = command
        else:
            found.update({(name, each): sub for each, sub in subcommands.items()})
    return found


# The command line as a whole ---------------------------------------------------------------------------------------


@pytest.mark.spec("CORE-19")
def test_version_is_printed_without_importing_the_product(keyfold: Terminal) -> None:
    """Neither the framework nor the database library is loaded to print a version."""
    assert keyfold("--version").stdout == f"keyfold {__version__}\n"
    assert json.loads(keyfold("--version", "--json").stdout) == {"version": __version__}
    code = "import sys; sys.argv = ['keyfold', '--version']; from keyfold.cli.main import main; main()"
    loaded = keyfold.python(f"{code}; print(*sorted(sys.modules))").stdout
    assert not re.search(r"\b(typer|rich|sqlalchemy|msgspec|alembic|ibis|structlog)\b", loaded)


@pytest.mark.spec("CORE-19")
def test_help_explains_the_product_the_parts_and_the_first_steps(keyfold: Terminal) -> None:
    shown = keyfold("--help")
    assert shown.returncode == 0
    for word in ("events", "profiles", "order stats", "segments", "numbering", "listings", "tally", "keyfold serve"):
        assert word in shown.stdout
    for path in commands():
        assert re.search(rf"^ +{path[0]} ", shown.stdout, re.MULTILINE)
    assert keyfold().stdout == shown.stdout


@pytest.mark.spec("CORE-19")
def test_every_command_and_option_is_explained_and_takes_the_common_options() -> None:
    """Generated from the tree of commands: one without --json, or without a word of help, fails here."""
    for path, command in commands().items():
        assert command.help, path
        options = {option for param in command.params for option in param.opts}
        assert {"--json", "--store", "--config"} <= options, path
        unexplained = [
            param.name
            for param in command.params
            if param.param_type_name == "option" and not getattr(param, "help", None)
        ]
        assert unexplained == [], path


@pytest.mark.spec("CORE-19")
def test_help_of_a_command_is_printed_without_opening_anything(keyfold: Terminal) -> None:
    shown = keyfold("topics", "replay", "--help", KEYFOLD_STORE_URL="nonsense")
    assert shown.returncode == 0
    assert "--from-time" in shown.stdout
    assert list(keyfold.directory.iterdir()) == []


@pytest.mark.spec("CORE-19")
def test_an_unknown_command_is_refused_with_the_nearest_one(keyfold: Terminal) -> None:
    assert "Did you mean 'serve'?" in refused(keyfold("serv"), code=2)
    assert "Did you mean 'tally'?" in refused(keyfold("taly", "get"), code=2)
    assert "Did you mean 'replay'?" in refused(keyfold("topics", "reply"), code=2)


@pytest.mark.spec("CORE-19")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--port", "many"], "not a whole number"),
        (["token", "create", "x"], "--scope"),
        (["tally", "get"], "KEY"),
        (["topics", "tail", "t", "--last", "1", "--from-position", "2"], "exclude each other"),
        (["topics", "tail", "t", "--from-position", "-1"], "-1 is not at least 0"),
        (["listings", "seller", "7", "--limit", "1001"], "1001 is not in the range 1 to 1000"),
        (["topics", "replay", "t"], "--from-position"),
        (["topics", "discard", "tally", "t", "0", "0"], "--yes"),
        (["tally", "get", b"\xff"], "UTF-8"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(keyfold: Terminal, arguments: list[str], says: str) -> None:
    refused(keyfold(*arguments), says, code=2)
    assert list(keyfold.directory.iterdir()) == []


@pytest.mark.spec("CORE-13")
def test_an_error_for_a_program_is_one_json_object_on_stderr(keyfold: Terminal) -> None:
    done = keyfold("token", "list", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    error = json.loads(done.stderr)
    assert set(error) == {"error", "detail", "place", "hint"}
    assert error["error"] == "store-refused"
    assert json.loads(keyfold("serv", "--json").stderr)["error"] == "usage"


@pytest.mark.spec("CORE-13")
def test_an_unexpected_fault_is_one_line_and_a_traceback_only_on_request(keyfold: Terminal) -> None:
    """Neither shows a password."""
    code = (
        "import sys, keyfold.core.context as context\n"
        "def fail(*_, **__): raise RuntimeError('cannot reach postgresql://ann:hunter2@host/db')\n"
        "context.Context.open = fail\n"
        "from keyfold.cli.run import run; sys.exit(run(['tally', 'get', 'a']))"
    )
    done = keyfold.python(code)
    line = refused(done, "unexpected RuntimeError", "KEYFOLD_LOG_LEVEL=debug")
    shown = keyfold.python(code, KEYFOLD_LOG_LEVEL="debug").stderr
    assert "Traceback" in shown
    assert "hunter2" not in line + shown


@pytest.mark.spec("CORE-19")
def test_output_that_nobody_reads_any_more_is_no_error(keyfold: Terminal) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run(
        [KEYFOLD, "settings"], cwd=keyfold.directory, stdout=write_end, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write_end)
    assert process.stderr == b""


@pytest.mark.spec("CORE-19")
def test_completion_knows_commands_options_and_parts(keyfold: Terminal) -> None:
    def completed(words: str, at: int) -> list[str]:
        return keyfold(_KEYFOLD_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(at)).stdout.split()

    assert completed("keyfold t", 1) == ["token", "topics", "tally"]
    assert completed("keyfold topics re", 2) == ["replay", "redrive"]
    assert "--json" in completed("keyfold tally get --", 3)
    assert "complete -o default" in keyfold(_KEYFOLD_COMPLETE="source_bash").stdout


# Wrong settings, wrong stores --------------------------------------------------------------------------------------


@pytest.mark.spec("CORE-13")
@pytest.mark.parametrize(
    ("store", "says"),
    [
        ("keyfold.db", "not the URL of a store"),
        ("", "not the URL of a store"),
        ("mysql://ann:hunter2@host/db", "no store of kind mysql"),
        ("sqlite://", "needs a file"),
        ("sqlite:////absent/directory/keyfold.db", "there is no directory /absent/directory"),
        ("postgresql://ann:hunter2@127.0.0.1:1/db", "onnection"),
    ],
)
def test_a_wrong_url_is_refused_with_where_it_was_written_and_without_its_password(
    keyfold: Terminal, store: str, says: str
) -> None:
    line = refused(keyfold("tally", "get", "a", "--store", store), says, "(at --store)")
    assert "hunter2" not in line


@pytest.mark.spec("CORE-13")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[http", "cannot be read"),
        ("[htp]\nport = 1", "unknown section [htp]"),
        ("[http]\nprot = 1", "unknown setting http.prot"),
        ("[http]\nport = 'many'", "http.port"),
    ],
)
def test_a_wrong_file_of_settings_is_refused(keyfold: Terminal, text: str, says: str) -> None:
    (keyfold.directory / "wrong.toml").write_text(text)
    refused(keyfold("settings", "--config", "wrong.toml"), says, "wrong.toml")


@pytest.mark.spec("CORE-13")
def test_a_missing_file_and_unknown_or_wrong_variables_are_refused(keyfold: Terminal) -> None:
    refused(keyfold("settings", KEYFOLD_CONFIG="absent.toml"), "there is no file absent.toml")
    refused(keyfold("tally", "get", "a", KEYFOLD_STORE_URL="nonsense"), "store.url, KEYFOLD_STORE_URL")
    refused(keyfold("settings", KEYFOLD_HTTP_PROT="1"), "KEYFOLD_HTTP_PROT")
    refused(keyfold("settings", KEYFOLD_HTTP_PORT="many"), "http.port", "KEYFOLD_HTTP_PORT")
    refused(keyfold("serve", "--port", "70000"), "http.port", "command line")


@pytest.mark.spec("CORE-13")
def test_a_directory_that_cannot_be_written_is_refused(keyfold: Terminal) -> None:
    """/sys takes no files from anybody, not even from root."""
    refused(keyfold("tally", "add", "a", "--store", "sqlite:////sys/keyfold.db"), "Permission denied", "writable")


@pytest.mark.spec("CORE-13")
def test_a_file_that_is_no_database_is_refused_and_left_as_it_was(keyfold: Terminal) -> None:
    file = keyfold.directory / "photo.jpg"
    file.write_bytes(b"\xff\xd8 not a database" * 300)
    before = file.read_bytes()
    for command in (["store", "status"], ["store", "upgrade"], ["serve", "--port", "0"]):
        refused(keyfold(*command, "--store", "sqlite:///photo.jpg"), "not a sound SQLite file", "(at --store)")
    assert file.read_bytes() == before


@pytest.mark.spec("CORE-12")
def test_looking_at_a_store_that_is_not_there_makes_none(keyfold: Terminal) -> None:
    """A mistyped name is an error, not an empty store."""
    for command in (["store", "status"], ["token", "list"], ["topics", "list"]):
        refused(keyfold(*command, "--store", "sqlite:///typo.db"), "there is no store", "keyfold store upgrade")
    assert list(keyfold.directory.iterdir()) == []


# The store ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("CORE-12")
def test_upgrade_makes_the_schema_and_a_repeat_changes_nothing(keyfold: Terminal, url: str) -> None:
    first = keyfold.answer("store", "upgrade", "--store", url)
    second = keyfold.answer("store", "upgrade", "--store", url)
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (first["before"], first["changed"], second["changed"]) == (None, True, False)
    assert first["after"] == second["before"] == second["after"]
    status = keyfold.answer("store", "status", "--store", url)
    assert isinstance(status, dict)
    assert (status["state"], status["schema"]) == ("current", status["known"])


@pytest.mark.spec("CORE-12")
def test_an_empty_server_store_is_refused_until_it_is_upgraded(keyfold: Terminal, postgres_url: str) -> None:
    line = refused(keyfold("serve", "--port", "0", "--store", postgres_url), "is empty", "keyfold store upgrade")
    assert postgres_url.split("@")[-1] in line
    assert keyfold("store", "upgrade", "--store", postgres_url).returncode == 0
    assert keyfold("tally", "add", "a", "--store", postgres_url).returncode == 0


@pytest.mark.spec("CORE-12")
@pytest.mark.parametrize(
    ("version", "state", "advice"), [("9999", "unknown", "newer keyfold"), ("0000", "old", "keyfold store upgrade")]
)
def test_a_schema_that_is_not_ours_is_refused_with_advice(
    keyfold: Terminal, ready: str, version: str, state: str, advice: str
) -> None:
    store = Store.open(ready)
    store.transact(lambda tx: tx.driver(f"UPDATE alembic_version SET version_num = '{version}'"))
    store.close()
    for command in (["serve", "--port", "0"], ["work"], ["tally", "get", "a"]):
        refused(keyfold(*command, "--store", ready), version, advice)
    status = keyfold.answer("store", "status", "--store", ready)
    assert isinstance(status, dict)
    assert status["state"] == state


@pytest.mark.spec("ECO-05")
def test_distribute_says_what_is_missing_where_there_is_no_citus(keyfold: Terminal, postgres_url: str) -> None:
    made_ready(postgres_url)
    refused(keyfold("store", "distribute", "--store", postgres_url), "no Citus extension", "CREATE EXTENSION citus")
    refused(keyfold("store", "distribute", "--store", "sqlite:///some.db"), "SQLite", "Citus")


# Settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("CORE-19")
def test_settings_shows_every_setting_its_source_and_no_secret(keyfold: Terminal) -> None:
    (keyfold.directory / "keyfold.toml").write_text("[log]\nlevel = 'warning'\n")
    options = '{"sasl.password": "hunter2", "client.id": "me"}'
    shown = keyfold(
        "settings", "--store", "postgresql://ann:hunter2@host/db", "--json", KEYFOLD_TOPICS_KAFKA_OPTIONS=options
    )
    assert "hunter2" not in shown.stdout
    rows = {row["name"]: row for row in json.loads(shown.stdout)}
    assert rows["store.url"]["value"] == "postgresql://ann:***@host/db"
    assert rows["store.url"]["source"] == "command line"
    assert rows["topics.kafka_options"]["value"] == {"sasl.password": "***", "client.id": "me"}
    assert rows["topics.kafka_options"]["source"] == "KEYFOLD_TOPICS_KAFKA_OPTIONS"
    assert rows["log.level"] == {**rows["log.level"], "value": "warning", "source": "keyfold.toml"}
    assert rows["http.port"]["source"] == "default"
    assert set(rows) == {row.name for row in load(parts=settings_of_parts(), environ={}).table}


# Tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("CORE-15")
def test_a_token_is_made_shown_once_listed_rotated_and_revoked(keyfold: Terminal, ready: str) -> None:
    at = ("--store", ready)
    made = keyfold.answer(
        "token", "create", "shop", "--scope", "read", "--scope", "ingest", "--grant", "unit=rides", "--grant",
        "unit=food", "--days", "30", *at,
    )  # fmt: skip
    assert isinstance(made, dict)
    assert set(made) == {"token", "token_id", "name", "scopes", "grants", "expires_at"}
    assert (made["scopes"], made["grants"]) == (["ingest", "read"], {"unit": ["food", "rides"]})

    with product(ready) as context:
        client, _ = client_of(context.store, made["token"])
        assert client.may("unit", "food")
        assert not client.may("unit", "taxi")
        rotated = keyfold.answer("token", "rotate", made["token_id"], "--overlap", "1d", *at)
        assert isinstance(rotated, dict)
        assert client_of(context.store, made["token"])[0].client_id == client.client_id
        assert keyfold("token", "revoke", made["token_id"], *at).returncode == 0
        with pytest.raises(Unauthenticated):
            client_of(context.store, made["token"])
        assert client_of(context.store, rotated["token"])[0].client_id == client.client_id
        acts = context.store.read(
            lambda tx: tx.execute(sa.select(AUDIT.c.act).order_by(AUDIT.c.number)).scalars().all()
        )
    assert acts == ["token created", "token created", "token rotated", "token revoked"]

    listed = keyfold("token", "list", *at)
    assert made["token_id"] in listed.stdout
    for token in (made, rotated):
        assert token["token"].split("_", 2)[2] not in listed.stdout
    states = {row["token_id"]: row["state"] for row in keyfold.answer("token", "list", *at)}  # type: ignore[attr-defined]
    assert states == {made["token_id"]: "revoked", rotated["token_id"]: "live"}


@pytest.mark.spec("CORE-15")
def test_a_token_goes_to_stdout_alone_so_that_a_script_can_take_it(keyfold: Terminal) -> None:
    done = keyfold("token", "create", "me", "--scope", "read")
    assert re.fullmatch(r"kf_[0-9a-f]{12}_[\w-]{43}\n", done.stdout)
    assert "cannot be shown again" in done.stderr
    assert done.stdout.strip() not in done.stderr


@pytest.mark.spec("CORE-13", "CORE-15")
def test_a_token_that_makes_no_sense_is_refused(keyfold: Terminal) -> None:
    refused(keyfold("token", "create", "x", "--scope", "fly"), "no scope 'fly'", "ingest")
    refused(keyfold("token", "create", "x", "--scope", "read", "--grant", "rides"), "KIND=NAME")
    refused(keyfold("token", "create", "x", "--scope", "read", "--grant", "planet=mars"), "planet", "unit")
    refused(keyfold("token", "create", "x", "--scope", "read", "--days", "0"), "3650")
    refused(keyfold("token", "revoke", "absent"), "absent", "keyfold token list")
    refused(keyfold("token", "rotate", "absent", "--overlap", "soon"), "'soon'", "1h30m")


# Tally and topics --------------------------------------------------------------------------------------------------


def test_a_tally_is_added_to_and_read(keyfold: Terminal, ready: str) -> None:
    assert keyfold.answer("tally", "add", "apples", "3", "--store", ready) == {
        "key": "apples",
        "value": 3,
        "version": 1,
    }
    assert keyfold.answer("tally", "add", "apples", "-5", "--store", ready) == {
        "key": "apples",
        "value": -2,
        "version": 2,
    }
    shown = keyfold("tally", "get", "apples", "pears", "--store", ready).stdout.splitlines()
    assert [line.split() for line in shown] == [["KEY", "VALUE", "VERSION"], ["apples", "-2", "2"], ["pears", "0", "0"]]


@pytest.mark.spec("CORE-14")
def test_a_tally_refuses_what_its_types_refuse(keyfold: Terminal) -> None:
    refused(keyfold("tally", "add", "a", str(2**63)), "9223372036854775807")
    refused(keyfold("tally", "add", "a" * 201), "length <= 200")
    refused(keyfold("tally", "get", ""), "length >= 1")
    assert list(keyfold.directory.iterdir()) == []


@pytest.fixture
def published(ready: str) -> str:
    """A store in which six events were published, and two more of which the first cannot be applied."""
    with product(ready) as context:
        relay = Relay(context, "tally-events", "test")
        for version in range(1, 7):
            put_event(context, "apples", version, b'{"add":1}')
            relay.step()
        put_event(context, "pears", 1, b'{"add":"many"}')
        put_event(context, "pears", 2, b'{"add":7}')
        relay.step()
        relay.stop()
    return ready


def put_event(context: Context, key: str, version: int, payload: bytes) -> None:
    message = Message(key=key, version=version, event_time_us=version * 10**6, schema="event/1", payload=payload)
    context.store.transact(lambda tx: outbox.put(tx, context.topics, "tally-events", [message]))


def held_leases(store: Store) -> int:
    count = sa.select(sa.func.count()).where(LEASES.c.expires_at_us > 0)
    return int(store.read(lambda tx: tx.execute(count).scalar_one()))


def worked(keyfold: Terminal, url: str, *, until: Callable[[], bool], **variables: str) -> None:
    """Let a worker work until something has come about."""
    with keyfold.running("work", "--store", url, "--json", **variables) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "started"
        while not until():
            assert process.poll() is None, process.communicate()
        process.terminate()
        assert process.wait(30) == 0


def lag(url: str) -> int:
    with product(url) as context:
        return sum(consumer.lag for topic in overview(context) for consumer in topic.consumers)


@pytest.mark.spec("CORE-05", "CORE-07")
def test_tail_prints_messages_from_a_place_on(keyfold: Terminal, published: str) -> None:
    def versions(*arguments: str) -> list[int]:
        done = keyfold("topics", "tail", "tally-events", *arguments, "--json", "--store", published)
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["version"] for line in done.stdout.splitlines() if '"apples"' in line]

    assert versions() == [1, 2, 3, 4, 5, 6]
    assert versions("--last", "2") == [5, 6]
    assert versions("--from-position", "4") == [5, 6]
    assert versions("--from-time", "-1h") == [1, 2, 3, 4, 5, 6]
    assert versions("--from-time", "2030-01-01T00:00:00Z") == []
    partition = str(partition_of("apples", 4))
    assert versions("--from-position", "1", "--partition", partition) == [2, 3, 4, 5, 6]
    (line,) = [
        line
        for line in keyfold("topics", "tail", "tally-events", "--store", published).stdout.splitlines()
        if "apples v3" in line
    ]
    assert '{"add":1}' in line
    assert "1970-01-01T00:00:03Z" in line
    refused(keyfold("topics", "tail", "absent", "--store", published), "no topic 'absent'")
    refused(keyfold("topics", "tail", "tally-events", "--partition", "9", "--store", published), "no partition 9")


@pytest.mark.spec("CORE-07")
def test_times_are_iso_with_a_zone_or_relative() -> None:
    now_us = 1_800_000_000 * 10**6
    for text, before in {"-2h": 7200, "90m ago": 5400, "1h30m ago": 5400, "-1d": 86400, " -90s ": 90}.items():
        assert moment_us(text, now_us) == now_us - before * 10**6
    assert moment_us("1970-01-02T00:00:00.000001Z", now_us) == 86400 * 10**6 + 1
    assert moment_us("1970-01-01T03:00:00+03:00", now_us) == 0
    assert [span_seconds(text) for text in ("0s", "1w", "1d12h")] == [0, 604800, 129600]


@pytest.mark.spec("CORE-13")
@pytest.mark.parametrize(
    "text", ["yesterday", "2026-01-01", "2026-01-01T00:00:00", "2h", "-2 parsecs", "-h", "ago", "", "-1h-1h"]
)
def test_any_other_time_is_refused_with_the_ways_to_write_one(text: str) -> None:
    with pytest.raises(BadInput) as refusal:
        moment_us(text, 0)
    assert refusal.value.hint is not None
    assert "Write" in refusal.value.hint


@pytest.mark.usefixtures("ready_file")
def test_a_wrong_time_is_one_line(keyfold: Terminal) -> None:
    refused(keyfold("topics", "tail", "tally-events", "--from-time", "yesterday"), "'yesterday'", "-2h")


def test_tail_follows_until_it_is_interrupted(keyfold: Terminal, ready: str) -> None:
    with (
        product(ready) as context,
        keyfold.running("topics", "tail", "tally-events", "--follow", "--json", "--store", ready) as process,
    ):
        put_event(context, "k", 1, b"\xff not json")
        relay = Relay(context, "tally-events", "test")
        relay.step()
        relay.stop()
        assert process.stdout is not None
        shown = json.loads(process.stdout.readline())
        assert (shown["key"], shown["payload_base64"]) == ("k", "/yBub3QganNvbg==")
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "")
        assert process.returncode == 130


@pytest.mark.spec("CORE-07", "CORE-08", "CORE-09")
def test_poison_is_listed_discarded_and_redriven_and_a_consumer_is_set_back(keyfold: Terminal, published: str) -> None:
    """The operator's whole story: let a worker run, look at what it set aside, mend, and replay."""
    at = ("--store", published)
    assert lag(published) == 8
    worked(keyfold, published, until=lambda: lag(published) == 0)
    assert keyfold.answer("tally", "get", "apples", *at)[0]["value"] == 6  # type: ignore[index]

    dead, parked = keyfold.answer("topics", "dead", *at)  # type: ignore[misc]
    assert (dead["key"], dead["state"], parked["version"], parked["state"]) == ("pears", "dead", 2, "parked")
    assert "add" in dead["reason"]
    assert keyfold.answer("topics", "dead", "--consumer", "nobody", *at) == []

    again = keyfold("topics", "redrive", "tally", "--json", *at)
    assert again.returncode == 1
    assert [letter["key"] for letter in json.loads(again.stdout)["failed"]] == ["pears"]

    refused(
        keyfold("topics", "replay", "tally-events", "--from-position", "0", "--consumer", "tally", *at), "set aside"
    )
    place = [str(dead["partition"]), str(dead["position"])]
    keyfold.answer("topics", "discard", "tally", "tally-events", *place, "--yes", *at)
    refused(keyfold("topics", "discard", "tally", "tally-events", *place, "--yes", *at), "no dead letter")
    redriven = keyfold.answer("topics", "redrive", "tally", "--key", "pears", *at)
    assert redriven == {"consumer": "tally", "applied": 1, "failed": []}
    assert keyfold.answer("tally", "get", "pears", *at)[0]["value"] == 7  # type: ignore[index]

    moved = keyfold.answer("topics", "replay", "tally-events", "--from-time", "-1h", "--consumer", "tally", *at)
    assert sum(each["before"] - each["after"] for each in moved) == 8  # type: ignore[attr-defined]
    assert lag(published) == 8


@pytest.mark.spec("CORE-07")
@pytest.mark.usefixtures("ready_file")
def test_a_replay_that_makes_no_sense_is_refused_with_what_to_do(keyfold: Terminal) -> None:
    replay = ("topics", "replay", "--from-position", "0")
    refused(keyfold(*replay, "tally-events"), "embedded", "--consumer")
    refused(keyfold(*replay, "tally-events", "--consumer", "nobody"), "no consumer 'nobody'", "tally")
    refused(keyfold(*replay, "tally-changes", "--consumer", "tally"), "reads tally-events")
    refused(keyfold(*replay, "tally-events", "--consumer", "tally", "--partition", "9"), "no partition 9")


@pytest.mark.spec("CORE-05", "CORE-07")
@pytest.mark.xdist_group("kafka")
def test_on_kafka_a_topic_is_listed_tailed_and_sent_again(
    keyfold: Terminal, ready_file: str, kafka_server: KafkaServer
) -> None:
    on_kafka = {"KEYFOLD_TOPICS_KIND": "kafka", "KEYFOLD_TOPICS_KAFKA": kafka_server.bootstrap}
    for topic in ("tally-events", "tally-changes", "rides-orders-completed", "cdp-segments-log", *LISTINGS_TOPICS):
        kafka_server.create_topic(topic, 4)
    keyfold.answer("tally", "add", "apples", **on_kafka)
    pending = sa.select(sa.func.count()).where(MESSAGES.c.position.is_(None))
    store = Store.open(ready_file)
    worked(keyfold, ready_file, until=lambda: store.read(lambda tx: tx.execute(pending).scalar_one()) == 0, **on_kafka)
    store.close()

    def versions() -> list[int]:
        done = keyfold("topics", "tail", "tally-changes", "--json", **on_kafka)
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["version"] for line in done.stdout.splitlines()]

    assert versions() == [1]
    sent = keyfold.answer("topics", "replay", "tally-changes", "--from-time", "-1h", **on_kafka)
    assert sum(each["messages"] for each in sent) == 1  # type: ignore[attr-defined]
    assert versions() == [1, 1]
    listed = keyfold.answer("topics", "list", **on_kafka)
    assert {topic["topic"]: topic["kept"] for topic in listed} == {  # type: ignore[attr-defined]
        **dict.fromkeys(LISTINGS_TOPICS, 0),
        "cdp-segments-log": 0,
        "rides-orders-completed": 0,
        "tally-changes": 2,
        "tally-events": 0,
    }


# Serve and work ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("CORE-19")
def test_serve_answers_works_and_stops_with_exit_code_0(keyfold: Terminal, ready: str) -> None:
    with product(ready) as context:
        put_event(context, "apples", 1, b'{"add":1}')
    with keyfold.running("serve", "--demo", "--port", "0", "--store", ready, "--json") as process:
        assert process.stdout is not None
        host, port = json.loads(process.stdout.readline())["url"].removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert connection.makefile("rb").readline().startswith(b"HTTP/1.1 200")
        while not changes_published(ready):
            assert process.poll() is None
        process.terminate()
        assert process.wait(30) == 0


def changes_published(url: str) -> int:
    with product(url) as context:
        (changes,) = [topic for topic in overview(context) if topic.topic == "tally-changes"]
        return changes.kept


@pytest.mark.spec("CORE-19")
def test_serve_without_work_publishes_nothing(keyfold: Terminal, ready_file: str) -> None:
    with product(ready_file) as context:
        put_event(context, "apples", 1, b'{"add":1}')
    with keyfold.running("serve", "--no-work", "--demo", "--port", "0", "--json") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["works"] is False
        process.terminate()
        assert process.wait(30) == 0
    with product(ready_file) as context:
        assert {topic.topic: topic.pending for topic in overview(context)} == {
            "cdp-segments-log": 0,
            "rides-orders-completed": 0,
            **dict.fromkeys(LISTINGS_TOPICS, 0),
            "tally-changes": 0,
            "tally-events": 1,
        }


@pytest.mark.spec("CORE-15")
def test_serve_refuses_an_open_address_without_tokens_and_in_demo_mode(keyfold: Terminal) -> None:
    refused(keyfold("serve", "--host", "0.0.0.0", "--port", "0"), "no client token", "keyfold token create")
    refused(keyfold("serve", "--host", "0.0.0.0", "--port", "0", "--demo"), "demo")


@pytest.mark.spec("CORE-19")
@pytest.mark.usefixtures("ready_file")
def test_serve_imports_no_migrations_no_bulk_engine_and_no_second_validator(
    keyfold: Terminal, environment: dict[str, str]
) -> None:
    """Alembic and Ibis cost half a second each, Pydantic a quarter: none is on the way to serving."""
    imports = keyfold.directory / "imports"
    with imports.open("w") as stderr:  # a pipe that nobody reads would fill up and stop the server
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "keyfold.cli.main", "serve", "--demo", "--port", "0"],
            cwd=keyfold.directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert process.stdout is not None
        assert "listens on http://127.0.0.1:" in process.stdout.readline()
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
    imported = imports.read_text()
    assert "sqlalchemy" in imported
    assert not re.search(r"\b(alembic|ibis|pydantic)\b", imported)


@pytest.mark.spec("CORE-20")
def test_a_worker_that_is_told_to_stop_hands_its_leases_back(keyfold: Terminal, ready: str) -> None:
    """The next worker need not wait for them to expire."""
    store = Store.open(ready)
    worked(keyfold, ready, until=lambda: held_leases(store) >= 12)  # two relays and a consumer, four partitions each
    assert held_leases(store) == 0
    assert store.read(lambda tx: tx.execute(sa.select(sa.func.count()).select_from(MEMBERS)).scalar_one()) == 0
    store.close()


@pytest.mark.spec("CORE-20")
def test_a_worker_whose_output_nobody_reads_still_hands_its_leases_back(keyfold: Terminal, ready_file: str) -> None:
    store = Store.open(ready_file)
    with keyfold.running("work") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Working on")
        while not held_leases(store):
            assert process.poll() is None
        process.stdout.close()
        process.terminate()
        process.wait(30)
    assert held_leases(store) == 0
    store.close()


@pytest.mark.spec("CORE-20")
def test_a_second_signal_stops_a_worker_at_once(keyfold: Terminal, ready_file: str) -> None:
    """While another process holds the store, leases cannot be handed back; nobody has to wait for that."""
    store = Store.open(ready_file)
    with keyfold.running("work", "--json") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "started"
        with store.engine.write() as connection:
            process.terminate()
            assert json.loads(process.stdout.readline())["event"] == "stopping"
            process.terminate()
            assert process.wait(30) == 128 + signal.SIGTERM
            store.engine.rollback(connection)
    store.close()


def test_work_refuses_a_part_that_is_not_there(keyfold: Terminal) -> None:
    refused(keyfold("work", "taly"), "no part 'taly'", "tally")


# Counters ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("CNT-02")
def test_a_catalog_is_shown_by_the_keys_that_counters_share(keyfold: Terminal) -> None:
    shown = keyfold("counters", "show", str(EXAMPLE)).stdout
    assert "user: IF_ID(EN_OFFER_ID); at most 30 keys, each for 60 days, 600 owned updates held back" in shown
    for asked in ("539", "CI_DESKTOP_MAP_PERMALINK_CLICK_COUNT"):
        one = keyfold.answer("counters", "show", str(EXAMPLE), "--counter", asked)
        assert isinstance(one, dict)
        assert (one["id"], one["shares_keys_with"], one["usage_restriction"]) == (539, [540], "UR_METRIKA_OWNED")
    refused(keyfold("counters", "show", str(EXAMPLE), "--counter", "CI_NOPE"), "no counter CI_NOPE")
    refused(keyfold("counters", "show", str(EXAMPLE), "--counter", "9" * 5_000), "there is no counter 999")


@pytest.mark.spec("CNT-02")
def test_a_catalog_that_is_not_named_or_wrong_is_refused_with_what_to_do(keyfold: Terminal) -> None:
    refused(keyfold("counters", "show"), "profiles.catalog", "keyfold counters example > counters.proto")
    refused(keyfold("counters", "show", "absent.proto"), "there is no file absent.proto")
    refused(keyfold("counters", "show", "."), ". is not a plain file")
    (keyfold.directory / "wrong.proto").write_text(EXAMPLE.read_text().replace("VF_DOUBLE\n", "VF_DUBLE\n"))
    refused(keyfold("counters", "show", "wrong.proto"), "CI_OFFER_REVENUE_SUM: ValueFunction is VF_DUBLE")


@pytest.mark.spec("CNT-19")
def test_lint_fails_where_a_change_breaks_or_loses_stored_data(keyfold: Terminal) -> None:
    def linted(before: str, after: str) -> tuple[int, list[str]]:
        (keyfold.directory / "new.proto").write_text(EXAMPLE.read_text().replace(before, after))
        done = keyfold("counters", "lint", str(EXAMPLE), "new.proto", "--json")
        return done.returncode, [finding["severity"] for finding in json.loads(done.stdout)]

    assert linted("MaxRecords: 60", "MaxRecords: 70") == (0, ["safe"])
    assert linted("MaxRecords: 60", "MaxRecords: 50") == (1, ["loses"])
    assert linted("ValueFunction: VF_DOUBLE", "ValueFunction: VF_FLOAT") == (1, ["breaks"])
    shown = keyfold("counters", "lint", str(EXAMPLE), "new.proto")
    assert "breaks  CI_OFFER_REVENUE_SUM (601): kind changed from double to float" in shown.stdout


# Every command, for a program ---------------------------------------------------------------------------------------

CASES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("store", "upgrade"): (),
    ("store", "status"): (),
    ("settings",): (),
    ("token", "create"): ("me", "--scope", "read"),
    ("token", "list"): (),
    ("store", "reset-tickets"): (),
    ("topics", "list"): (),
    ("topics", "tail"): ("tally-changes",),
    ("topics", "replay"): ("tally-events", "--from-position", "0", "--consumer", "tally"),
    ("topics", "dead"): (),
    ("topics", "redrive"): ("tally",),
    ("tally", "add"): ("apples",),
    ("tally", "get"): ("apples",),
    ("profiles", "export"): ("profiles.parquet",),
    ("orders", "status"): (),
    ("orders", "query"): ("phone_id=1",),
    ("orders", "check"): ("phone_id=1", "--fewer-than", "3"),
    ("orders", "kept"): (),
    ("orders", "redrive"): (),
    ("orders", "add-identity"): ("mail",),
    ("segments", "create"): ("sports",),
    ("segments", "status"): (),
    ("segments", "sweep"): (),
    ("segments", "get"): ("1",),
    ("segments", "history"): ("1",),
    ("listings", "drift"): (),
    ("listings", "export-status"): (),
    ("number", "history"): (),
    ("number", "shard"): ("7/5/1/chair",),
    ("counters", "example"): (),
    ("counters", "show"): (str(EXAMPLE),),
    ("counters", "lint"): (str(EXAMPLE), str(EXAMPLE)),
}
# Proved by tests of their own above: they need something that only those have, or go on until stopped.
ELSEWHERE = {
    ("serve",),
    ("work",),
    ("store", "distribute"),
    ("token", "revoke"),
    ("token", "rotate"),
    ("topics", "discard"),
    ("profiles", "get"),
    ("profiles", "explain"),
    ("profiles", "replay"),
    ("orders", "backfill"),
    ("orders", "import"),
    ("orders", "add-dimension"),
    ("orders", "correct"),
    *(
        ("number", each)
        for each in (
            "run",
            "run-master",
            "plan",
            "find",
            "compatible",
            "index",
            "invalidate",
            "adopt",
            "prune",
            "offers",
        )
    ),
    *(("listings", each) for each in ("offer", "seller", "feed", "repair")),
    *(("segments", each) for each in ("evaluate", "upload", "approve", "retry", "off", "on", "why")),
}


@pytest.mark.spec("CORE-19")
def test_every_command_has_a_test_of_its_json() -> None:
    assert set(CASES) | ELSEWHERE == set(commands())


@pytest.mark.spec("CORE-19")
@pytest.mark.usefixtures("ready_file")
@pytest.mark.parametrize("path", CASES, ids=" ".join)
def test_every_command_answers_a_program_in_json_and_a_person_in_text(
    in_process: Callable[..., Run], path: tuple[str, ...]
) -> None:
    done = in_process(*path, *CASES[path], "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for line in done.stdout.splitlines():
        json.loads(line)
    shown = in_process(*path, *CASES[path])
    assert shown.returncode == 0
    assert "\x1b" not in shown.stdout
