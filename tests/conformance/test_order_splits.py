"""A dimension added to random orders, killed at any commit while they come and are taken back, beside a recount."""

import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keyfold.orders.model import CompletedOrder
from keyfold.orders.service.correcting import correct_orders
from keyfold.orders.service.identities import add_identity
from keyfold.orders.service.splitting import split, switch
from tests.orders import DAY, HOUR, NOW, START, Orders, iso, opened, order, write_history

STARTS = {"phone_id": START, "device_id": START, "mail_id": START + DAY}
COMMITS = ("begin job", "split", "split done", "finish dimension")


class Killed(BaseException):
    """As a process that dies: nothing of it runs on."""


class Play:
    """Orders by chance, and what every identity must count of them."""

    def __init__(self, orders: Orders, chance: random.Random, path: Path) -> None:
        self.orders = orders
        self.chance = chance
        self.path = path
        self.every: dict[str, CompletedOrder] = {}
        self.counted: set[tuple[str, str]] = set()  # order, identity type: live, and not taken back
        self.filled: set[tuple[str, str]] = set()  # by the last backfill
        self.gone: set[str] = set()
        self.left: int | None = None  # until it is killed
        self._transact = orders.store.transact
        orders.store.transact = self.transact  # type: ignore[method-assign]

    def transact(self, work: Any, **more: Any) -> Any:
        """As the store does, but a split may be killed before and behind each of its commits."""
        is_split = more.get("name") in COMMITS
        self.pass_on(is_split)
        found = self._transact(work, **more)
        self.pass_on(is_split)
        return found

    def pass_on(self, is_split: bool) -> None:
        if is_split and self.left is not None:
            self.must_sum()
            self.left -= 1
            if self.left < 0:
                raise Killed

    def arrive(self, created: float, *without: str) -> None:
        chance, number = self.chance, len(self.every)
        identities = {name: f"{name[0]}{chance.randrange(2)}" for name in STARTS if chance.random() < 0.7}
        properties = {"tariff": chance.choice("ab"), "city": chance.choice(["riga", "omsk", "unknown"])}
        made = order(f"{number}", created, identities or {"phone_id": "p0"}, **properties)
        self.every[made.order_id] = made
        said = {name: value for name, value in properties.items() if name not in without}
        live = {(made.order_id, name) for name in made.identities if created >= STARTS[name]}
        sent = msgspec.structs.replace(made, properties=said)
        assert self.orders.count(sent) == ["accepted" if live else "before_start"]
        self.counted |= live

    def take_back(self) -> bool:
        """One of the orders that count, if there are any."""
        if not self.counted:
            return False
        chosen = self.chance.choice(sorted(self.counted))[0]
        unit = self.orders.unit
        (done,) = self._transact(lambda tx: correct_orders(tx, unit, [chosen], "fraud", "test"))
        assert done.status == "corrected"
        self.gone.add(chosen)
        self.counted = {each for each in self.counted if each[0] != chosen}
        return True

    def fill(self) -> None:
        self.orders.backfill(write_history(self.path, list(self.every.values())), *STARTS)
        self.filled = {
            (each.order_id, name)
            for each in self.every.values()
            for name in each.identities
            if each.created_at.timestamp() < STARTS[name] and each.order_id not in self.gone
        }

    def history(self, chances: float) -> Path:
        """All orders; of those that count live for all types some are lacking, or have one another's identities."""
        told = dict(self.every)
        late = [name for name, each in told.items() if each.created_at.timestamp() >= max(STARTS.values())]
        for name in late:
            if self.chance.random() < chances:
                other = self.chance.choice(late)
                ours, theirs = told[name], told[other]
                told[other] = msgspec.structs.replace(theirs, identities=ours.identities)
                told[name] = msgspec.structs.replace(ours, identities=theirs.identities)
        lacking = [name for name in late if self.chance.random() < chances / 4]
        return write_history(self.path, [each for name, each in told.items() if name not in lacking])

    def meanwhile(self, *_: Any) -> None:
        if self.chance.random() < 0.2:
            self.take_back()
        if self.chance.random() < 0.2:
            self.arrive(START + self.chance.uniform(DAY, 2 * DAY))  # one left to history would need a backfill
        self.must_sum()

    def wanted(self, *dimensions: str) -> Counter[tuple[str, ...]]:
        found: Counter[tuple[str, ...]] = Counter()
        for order_id, name in [*self.counted, *self.filled]:
            each = self.every[order_id]
            found[name, each.identities[name], *[each.properties[one] for one in dimensions]] += 1
        return found

    def must_sum(self, *dimensions: str) -> None:
        names = dimensions or ("tariff",)
        found: Counter[tuple[str, ...]] = Counter()
        for (name, value, values), count in self.orders.cells().items():
            found[name, value, *[dict(values)[one] for one in names]] += count
        assert found == self.wanted(*names)


@pytest.mark.spec("ORD-10", "ORD-16")
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_while_a_dimension_is_added_every_sum_is_right(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    given = {"identities": ["phone_id", "device_id"], "dimensions": ["tariff"], "start": iso(START)}
    with opened(f"sqlite:///{tmp_path / 'k.db'}", **given) as orders:
        add_identity(orders.store, orders.unit, "mail_id", STARTS["mail_id"] * 1_000_000)
        orders.clock.advance(START + 2 * DAY + HOUR - NOW)
        play = Play(orders, chance, tmp_path / "h.parquet")
        for _ in range(12):
            play.arrive(START + chance.uniform(-DAY, 2 * DAY), "city")
        play.take_back()
        play.fill()
        play.must_sum()
        for chances in (0.5, 0.5, 0.2, 0.2, 0.0):
            begun = switch(orders.store, orders.unit, "city")
            if begun is None:
                break
            play.left = chance.randrange(20) if chances else None
            history = orders.history(play.history(chances))
            with suppress(Killed):
                split(orders.store, orders.unit, begun, history, play.meanwhile, cells_max=chance.choice([1, 3, 99]))
        play.left = None
        assert switch(orders.store, orders.unit, "city") is None, "the last history is right"
        play.must_sum("tariff", "city")
        while play.take_back():
            play.must_sum("tariff", "city")
        play.fill()
        play.must_sum("tariff", "city")
