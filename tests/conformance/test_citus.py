"""A Citus cluster is a store like any other: spread by one command, then every statement of core gives right results.

Runs where KEYFOLD_CITUS_URL names a database with the Citus extension, to which the nodes were added.
"""

import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from msgspec import structs
from sqlalchemy.dialects import postgresql

from keyfold.core import audit, deadletters, outbox, progress
from keyfold.core.access import client_of, create, revoke, rotate, tokens
from keyfold.core.consumer import ConsumerWorker
from keyfold.core.context import Context
from keyfold.core.errors import LostRace, StoreRefused, Unauthenticated
from keyfold.core.janitor import Janitor
from keyfold.core.relay import Relay
from keyfold.core.replay import Start, set_back
from keyfold.core.settings import load as load_settings
from keyfold.core.store import Store, Transaction
from keyfold.core.store.distribute import distribute, placements
from keyfold.core.store.schema import EVERYWHERE, METADATA
from keyfold.core.store.shapes import (
    compare_and_set,
    delete,
    increment,
    insert,
    insert_new,
    load,
    locking_load,
    next_numbers,
    update,
)
from keyfold.core.tables import MESSAGES
from keyfold.core.topics.topic import Message
from keyfold.core.workers import consumer_named
from keyfold.listings.model import shard_of
from keyfold.listings.service import cabinet, drafting, keeping, offers, repairing
from keyfold.listings.service.drafting import Filled, Opening, Publishing
from keyfold.listings.service.feeds import applying, staging, tasks
from keyfold.listings.service.keeping import Opinion
from keyfold.listings.service.offers import Move
from keyfold.orders.model import Identity
from keyfold.orders.service.checking import Check, Checked, check_orders
from keyfold.orders.service.correcting import correct_orders
from keyfold.orders.service.unit import Units
from keyfold.orders.tables import tables_of
from keyfold.orders.worker import Sweep as OrdersSweep
from keyfold.parts import PARTS, settings_of_parts
from keyfold.profiles.tables import EVENT_MARKS, EVENT_WATERMARKS, HELD_UPDATES, PROFILES
from keyfold.profiles.worker import Sweep
from keyfold.tally import service
from keyfold.tally.model import Addition
from keyfold.tally.tables import TALLIES
from tests.listings import CAR, car
from tests.listings import opened as opened_listings
from tests.orders import START, iso, order, recount, write_history
from tests.orders import opened as opened_orders
from tests.profiles import OFFER, event
from tests.profiles import opened as opened_profiles

URL = os.environ.get("KEYFOLD_CITUS_URL", "")

pytestmark = [
    pytest.mark.skipif(not URL, reason="KEYFOLD_CITUS_URL names no Citus database"),
    pytest.mark.xdist_group("citus"),
]

KEYS = [f"key-{number:03}" for number in range(50)]


def keyfold(*arguments: str) -> object:
    """What a command answers."""
    command = [Path(sys.executable).with_name("keyfold"), *arguments, "--store", URL, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, timeout=120, check=True).stdout)


@pytest.fixture(scope="module")
def context() -> Iterator[Context]:
    """The product on the cluster: upgraded, with a row in it, and then spread."""
    keyfold("store", "upgrade")
    embedded = Store.open(URL)
    embedded.transact(lambda tx: insert_new(tx, TALLIES, _tallies(["before"], 7)))
    embedded.close()
    keyfold("store", "distribute")
    settings = load_settings(parts=settings_of_parts(), environ={}, options={"store.url": URL})
    opened = Context.open(settings, PARTS)
    yield opened
    opened.close()


@pytest.fixture
def store(context: Context) -> Store:
    """The cluster with empty tallies and messages."""
    for table in (TALLIES, MESSAGES):
        context.store.transact(lambda tx, table=table: tx.execute(sa.delete(table)))
    return context.store


@pytest.mark.spec("ECO-05")
def test_distribute_spreads_every_table_and_keeps_its_rows(context: Context) -> None:
    """Each table lies as it was declared, and what was there before is still there, once."""
    assert {each.table: each.by for each in placements(context.store)} == {
        table.name: table.info["distribute_by"] for table in METADATA.tables.values()
    }
    assert context.store.read(lambda tx: load(tx, TALLIES, {"key": ["before"]}, ["value"])) == {("before",): (7,)}


@pytest.mark.spec("ECO-05")
def test_distributing_again_changes_nothing(context: Context) -> None:
    before = placements(context.store)
    assert not any(spread.changed for spread in distribute(context.store))
    assert placements(context.store) == before


@pytest.mark.spec("ECO-05")
@pytest.mark.usefixtures("context")
def test_status_shows_where_the_tables_lie() -> None:
    status = keyfold("store", "status")
    assert isinstance(status, dict)
    assert "Citus" in status["server"]
    assert status["state"] == "current"
    assert {table["table"]: table["by"] for table in status["tables"]} == {
        table.name: table.info["distribute_by"] for table in [*METADATA.tables.values(), *tables_of("rides").all]
    }


@pytest.mark.spec("ECO-05")
def test_a_table_spread_by_another_column_is_refused_with_advice(context: Context) -> None:
    """Nothing is moved behind the operator's back."""
    context.store.transact(lambda tx: tx.driver("SELECT undistribute_table('members')"))
    context.store.transact(lambda tx: tx.driver("SELECT create_distributed_table('members', 'member')"))
    with pytest.raises(StoreRefused, match=r"members is spread by member.*undistribute_table"):
        distribute(context.store)
    context.store.transact(lambda tx: tx.driver("SELECT undistribute_table('members')"))
    assert [spread.table for spread in distribute(context.store) if spread.changed] == ["members"]


@pytest.mark.spec("ECO-05")
def test_tables_spread_by_columns_of_one_type_and_collation_are_colocated(context: Context) -> None:
    by_type: dict[str, set[int]] = {}
    for placement in placements(context.store):
        if placement.by != EVERYWHERE:
            column = METADATA.tables[placement.table].c[placement.by]
            kind = str(column.type.compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]
            by_type.setdefault(kind, set()).add(placement.colocation)
    assert {kind: len(groups) for kind, groups in by_type.items()} == dict.fromkeys(by_type, 1)


@pytest.mark.spec("ECO-05")
def test_a_sqlite_file_is_refused_with_advice(tmp_path: Path) -> None:
    embedded = Store.open(f"sqlite:///{tmp_path}/some.db")
    with pytest.raises(StoreRefused, match="Citus"):
        distribute(embedded)
    embedded.close()


def test_increment_adds_and_answers_the_new_values(store: Store) -> None:
    for _ in range(2):
        answer = store.transact(lambda tx: increment(tx, TALLIES, _tallies(KEYS, 3), returning=["value", "version"]))
    assert answer == {(key,): (6, 2) for key in KEYS}
    assert len({_shard(store, key) for key in KEYS}) > 1


def test_increment_takes_least_greatest_and_latest(store: Store) -> None:
    store.transact(lambda tx: increment(tx, TALLIES, _tallies(["a"], 5)))
    changes = {"key": ["a"], "value": [3], "version": [9], "event_version": [4]}
    store.transact(
        lambda tx: increment(tx, TALLIES, changes, least=["value"], greatest=["version"], latest=["event_version"])
    )
    assert _read(store, ["a"]) == {("a",): (3, 9, 4)}


def test_insert_new_answers_only_what_was_new(store: Store) -> None:
    store.transact(lambda tx: insert_new(tx, TALLIES, _tallies(KEYS[:20], 1)))
    fresh = store.transact(lambda tx: insert_new(tx, TALLIES, _tallies(KEYS, 2)))
    assert fresh == {(key,) for key in KEYS[20:]}


def test_insert_load_update_and_delete_speak_of_the_same_rows(store: Store) -> None:
    store.transact(lambda tx: insert(tx, TALLIES, _tallies(KEYS, 1)))
    changed = store.transact(lambda tx: update(tx, TALLIES, {"key": [*KEYS, "absent"], "value": [8] * 51}))
    assert changed == 50
    assert {row[0] for row in _read(store, KEYS).values()} == {8}
    assert store.transact(lambda tx: delete(tx, TALLIES, {"key": [*KEYS[:30], "absent"]})) == 30
    assert sorted(_read(store, KEYS)) == [(key,) for key in KEYS[30:]]


def test_compare_and_set_saves_new_and_known_rows_and_refuses_a_changed_one(store: Store) -> None:
    store.transact(lambda tx: compare_and_set(tx, TALLIES, _tallies(KEYS[:25], 1, version=0)))
    versions = [1] * 25 + [0] * 25
    columns = {"key": KEYS, "value": [2] * 50, "version": versions, "event_version": [0] * 50}
    store.transact(lambda tx: compare_and_set(tx, TALLIES, columns))
    assert set(_read(store, KEYS[:25]).values()) == {(2, 2, 0)}
    assert set(_read(store, KEYS[25:]).values()) == {(2, 1, 0)}
    with store.engine.write() as connection:
        stale = Transaction(connection, store.engine, None)
        with pytest.raises(LostRace):
            compare_and_set(stale, TALLIES, columns)


def test_locking_load_raises_the_version_of_what_is_there(store: Store) -> None:
    store.transact(lambda tx: insert(tx, TALLIES, _tallies(KEYS, 4)))
    found = store.transact(lambda tx: locking_load(tx, TALLIES, {"key": [*KEYS, "absent"]}, ["value", "version"]))
    assert found == {(key,): (4, 2) for key in KEYS}


def test_numbers_grow_and_are_given_once(store: Store) -> None:
    first = store.transact(lambda tx: list(next_numbers(tx, "messages", 100)))
    second = store.transact(lambda tx: list(next_numbers(tx, "messages", 100)))
    assert len({*first, *second}) == 200
    assert max(first) < min(second)


def test_concurrent_increments_lose_nothing(store: Store) -> None:
    """Four writers of the same fifty keys on all shards at once: every addition counts."""

    def write() -> None:
        for _ in range(10):
            store.transact(lambda tx: increment(tx, TALLIES, _tallies(KEYS, 1)), name="increments")

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {row[0] for row in _read(store, KEYS).values()} == {40}


def test_concurrent_locking_loads_lose_nothing(store: Store) -> None:
    """A load that locks, and the save of the same transaction, let nobody pass between them."""
    store.transact(lambda tx: insert(tx, TALLIES, _tallies(KEYS, 0)))

    def write() -> None:
        def work(tx: Transaction) -> None:
            rows = locking_load(tx, TALLIES, {"key": KEYS}, ["value"])
            update(tx, TALLIES, {"key": KEYS, "value": [rows[(key,)][0] + 1 for key in KEYS]})

        for _ in range(5):
            store.transact(work, name="locking loads")

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {row[0] for row in _read(store, KEYS).values()} == {15}


def test_messages_flow_from_the_outbox_through_relay_and_consumer(context: Context, store: Store) -> None:
    """Additions sent as events arrive in the tallies exactly once, and every change is announced in order."""
    partitions = context.topics.partitions(service.EVENTS.name)
    starts = [context.topics.source(service.EVENTS.name).bounds(partition).next for partition in range(partitions)]
    for version in (1, 2, 3):
        messages = [
            Message(key=key, version=version, event_time_us=version, schema="tally/1", payload=b'{"add":2}')
            for key in KEYS
        ]
        store.transact(lambda tx, messages=messages: outbox.put(tx, context.topics, service.EVENTS.name, messages))

    relay = Relay(context, service.EVENTS.name, "here")
    consumer = ConsumerWorker(context, consumer_named(context, "tally"), "here")
    while relay.step():
        pass
    source = context.topics.source(service.EVENTS.name)
    published = [
        record for partition in range(partitions) for record in source.fetch(partition, starts[partition], 1000, 0)
    ]
    assert len(published) == 150
    for key in KEYS:
        assert [record.message.version for record in published if record.message.key == key] == [1, 2, 3]
    for partition in range(partitions):
        assert source.position_at(partition, 0) == source.bounds(partition).first
    while consumer.step():
        pass
    relay.stop()
    consumer.stop()
    assert set(_read(store, KEYS).values()) == {(6, 1, 3)}


def test_poison_waits_with_its_key_and_is_driven_again(context: Context, store: Store) -> None:
    """On the cluster too a poison message is set aside, later ones of its key wait, and a redrive drains them."""
    topic = service.EVENTS.name
    payloads = [b'{"add":"x"}', b'{"add":1}']
    for version, payload in enumerate(payloads, start=1):
        message = Message(key="poison", version=version, event_time_us=1, schema="tally/1", payload=payload)
        store.transact(lambda tx, message=message: outbox.put(tx, context.topics, topic, [message]))
        relay = Relay(context, topic, "here")
        while relay.step():
            pass
        relay.stop()
        consumer = ConsumerWorker(context, consumer_named(context, "tally"), "here")
        while consumer.step():
            pass
        consumer.stop()
    letters = store.read(lambda tx: deadletters.listed(tx, "tally"))
    assert [(letter.version, letter.state) for letter in letters] == [(1, "dead"), (2, "parked")]
    dead = letters[0]
    deadletters.discard(store, "tally", topic, dead.partition, dead.position, actor="test")
    known = consumer_named(context, "tally")
    assert deadletters.redrive(store, "tally", topic, known.apply, ordered=known.ordered).applied == 1
    assert store.read(lambda tx: deadletters.listed(tx, "tally")) == []


def test_the_janitor_purges_and_measures(context: Context) -> None:
    janitor = Janitor(context)
    janitor.measure()
    assert janitor.purge() >= 0


def test_tokens_and_the_audit_chain(store: Store) -> None:
    text = create(store, "cluster", ["read"])
    token_id = text.split("_")[1]
    client, _ = client_of(store, text)
    assert client.name == "cluster"
    rotated = rotate(store, token_id, overlap_seconds=60)
    revoke(store, token_id)
    with pytest.raises(Unauthenticated):
        client_of(store, text)
    assert client_of(store, rotated)[0].client_id == client.client_id
    assert any(token.token_id == token_id and token.revoked_at_us for token in tokens(store))
    assert store.read(audit.broken) is None


def test_a_consumer_is_set_back(context: Context) -> None:
    known = consumer_named(context, "tally")
    worker = ConsumerWorker(context, known, "here")
    worker.step()
    worker.stop()
    moved = set_back(context, known, Start(time_us=0), actor="test")
    assert [each.partition for each in moved] == list(range(context.topics.partitions(known.topic)))
    stood = context.store.read(lambda tx: progress.positions(tx, known.job))
    assert {partition: each.position for partition, each in stood.items()} == {
        each.partition: each.after for each in moved
    }


def test_the_tally_service_works_on_the_cluster(context: Context, store: Store) -> None:
    """Add, replace and read, with their messages, as the HTTP door and the command line call them."""
    store.transact(lambda tx: service.add(tx, context.topics, [Addition(key, 5) for key in KEYS]))
    store.transact(lambda tx: service.replace(tx, context.topics, KEYS[0], 9, 1))
    found = store.read(lambda tx: service.read(tx, [*KEYS, "never"]))
    assert found[KEYS[0]].value == 9
    assert {found[key].value for key in KEYS[1:]} == {5}
    assert found["never"].version == 0


def _tallies(keys: list[str], value: int, version: int = 1) -> dict[str, list[object]]:
    count = len(keys)
    return {"key": list(keys), "value": [value] * count, "version": [version] * count, "event_version": [0] * count}


def _read(store: Store, keys: list[str]) -> dict[tuple[object, ...], tuple[object, ...]]:
    return store.read(lambda tx: load(tx, TALLIES, {"key": keys}, ["value", "version", "event_version"]))


def _shard(store: Store, key: str) -> int:
    return int(
        store.read(
            lambda tx: tx.driver(
                "SELECT get_shard_id_for_distribution_column('tallies', %s::text)", (key,)
            ).scalar_one()
        )
    )


@pytest.mark.spec("CORE-04", "ECO-05")
def test_a_batch_with_more_parameters_than_a_statement_takes_is_applied_whole(store: Store) -> None:
    keys = [f"k{number}" for number in range(40_000)]
    for expected in (1, 2):
        after = store.transact(lambda tx: increment(tx, TALLIES, _tallies(keys, 1), returning=["value"]))
        assert set(after.values()) == {(expected,)}
        assert len(after) == len(keys)


@pytest.mark.spec("ECO-05", "PRO-02", "PRO-04", "PRO-07")
@pytest.mark.usefixtures("context")
def test_profiles_are_counted_held_back_released_merged_and_swept() -> None:
    """Profiles, marks and held-back updates lie on different nodes, and still commit together."""
    with opened_profiles(URL) as profiles:
        store = profiles.context.store
        for table in (PROFILES, EVENT_MARKS, HELD_UPDATES, EVENT_WATERMARKS):
            store.transact(lambda tx, table=table: tx.execute(sa.delete(table)))
        events = [event(f"e{n}", n % 20, [OFFER, 1], [OFFER, 2, 1, f"o{n % 3}.example"]) for n in range(200)]
        assert {verdict.status for verdict in profiles.count(*events)} == {"counted"}
        assert {verdict.status for verdict in profiles.count(*events)} == {"duplicate"}
        assert [profiles.values(n) for n in range(20)] == [{1: 10.0, 2: 10.0}] * 20
        assert profiles.values(*range(20)) == {1: 200.0, 2: 200.0}
        profiles.clock.advance(61 * 86_400)
        sweep = Sweep(profiles.context, profiles.product)
        while sweep.step():
            pass
        assert profiles.read(1).version == 0


@pytest.mark.spec("ECO-05", "ORD-05", "ORD-08", "ORD-10", "ORD-14")
@pytest.mark.usefixtures("context")
def test_orders_are_counted_filled_split_checked_and_taken_back(tmp_path: Path) -> None:
    """Marks lie by order, cells by identity, and still commit together."""
    unit = f"t{uuid.uuid4().hex[:10]}"
    options = {"start": iso(START), "limits__transaction_seconds_max": 5, "limits__lock_seconds_max": 5}
    with opened_orders(URL, unit=unit, **options) as orders:
        distribute(orders.store, named=orders.unit.tables.all)
        placed = {each.table: each.by for each in placements(orders.store, orders.unit.tables.all)}
        assert placed[orders.unit.tables.cells.name] == "identity_value"
        every = [
            order(f"o{n}", START - 3_000 + 60 * n, {"phone_id": f"p{n % 9}", "card_id": f"c{n % 4}"}, city=f"x{n % 3}")
            for n in range(100)
        ]
        bare = [structs.replace(each, properties={}) for each in every]
        orders.clock.advance(3 * 3_600)
        assert orders.count(*bare).count("accepted") == orders.count(*bare).count("duplicate") == 50
        path = write_history(tmp_path / "h.parquet", every)
        orders.backfill(path, cells_max=10)
        assert orders.add_dimension("city", path, cells_max=10).is_done
        dimensions = ["tariff", "brand", "payment_method_type", "city"]
        assert orders.cells() == recount(every, dimensions, ["phone_id", "card_id"])
        asked = Check(
            [Identity("phone_id", "p1"), Identity("card_id", "c1")], fewer_than=30, order_id="x", reserve_seconds=9
        )
        (answer,) = orders.store.transact(lambda tx: check_orders(tx, orders.unit, [asked]))
        assert isinstance(answer, Checked)
        assert answer.allowed
        orders.store.transact(lambda tx: correct_orders(tx, orders.unit, ["o99"], "fraud", "test"))
        assert orders.cells() == recount(every[:99], dimensions, ["phone_id", "card_id"])
        orders.clock.advance(60 * 86_400)
        sweep = OrdersSweep(orders.context, Units({unit: orders.unit}))
        while sweep.step():
            pass
        assert orders.count(*bare[50:]).count("late") == 50


@pytest.mark.spec("ECO-05", "LST-02", "LST-04", "LST-08", "LST-09", "LST-12")
@pytest.mark.usefixtures("context")
def test_listings_live_on_the_cluster() -> None:
    """What is a seller's lies together, ids of offers elsewhere, and both commit together."""
    mark = uuid.uuid4().hex[:8]
    sellers = [f"{mark}-{number}" for number in range(12)]
    with opened_listings(URL) as product:
        visit = product.do(drafting.open_drafts, Opening(anonymous_id=f"{mark}-visitor", category="cars"))
        draft = product.do(drafting.open_drafts, Opening(anonymous_id=f"{mark}-visitor", seller_id=sellers[0]))
        assert draft.draft_id == visit.draft_id
        filled = Filled(category="cars", content=dict(CAR))
        draft = product.do(drafting.fill, draft.owner_id, draft.draft_id, draft.version, filled)
        asked = Publishing(owner_id=draft.owner_id, draft_id=draft.draft_id, version=draft.version)
        first, again = (product.do(drafting.publish, [asked])[0] for _ in range(2))
        assert first == again
        made = product.make(*[car(seller) for seller in sellers for _ in range(10)])
        opinions = [Opinion(offer_id=each.offer.offer_id, version=1, is_banned=True) for each in made[::2]]
        assert {each.result for each in product.do(keeping.judge, opinions)} == {"applied"}
        moves = [Move(offer_id=each.offer.offer_id, status="sold", may_see=lambda _: True) for each in made[1::4]]
        assert not [each for each in product.do(offers.move, moves) if isinstance(each, Exception)]
        for seller in sellers:
            assert product.counts(seller) == product.listed(seller)
            assert product.store.read(lambda tx, seller=seller: repairing.drift(tx, seller)) == []  # type: ignore[misc]
        page = product.store.read(lambda tx: cabinet.page(tx, sellers[3], "all", "", 4))
        assert (len(page.offers), page.count) == (4, 10)
        product.store.transact(
            lambda tx: tx.driver(
                "UPDATE user_offer_presets_count SET offers = offers + 3 WHERE seller_id = %s", (sellers[1],)
            )
        )
        assert product.store.transact(lambda tx: repairing.repair(tx, sellers[1], "test"))
        assert product.counts(sellers[1]) == product.listed(sellers[1])
        lines = [msgspec.json.encode({"external_id": str(n), "category": "cars", "content": CAR}) for n in range(50)]
        staging.take_lines(product.store, product.listings, sellers[2], 1, 0, lines)
        product.do(tasks.end_task, sellers[2], 1, len(lines))
        while applying.step(product.store, product.listings, shard_of(sellers[2]), lambda _: None):
            pass
        assert product.counters(sellers[2])["Active"] >= 50
        told = [each for each in product.told() if each[3]["seller_id"] == sellers[2]]
        assert len({key for key, _, _, _ in told}) == 60
