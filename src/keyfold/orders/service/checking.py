"""First-N checks: whether every identity has fewer than N orders, and places held for orders to come.

Whoever holds a place first holds the gates of all the identities, in key order, so two cannot take the last one. What
is held counts as taken wherever the order to come could match the filter: a check refuses rather than grants too much.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct

from keyfold.core.clock import SECOND_US
from keyfold.core.errors import BadInput, Conflict, KeyfoldError
from keyfold.core.store import Transaction
from keyfold.core.store.batch import Columns
from keyfold.core.store.shapes import delete, increment, load
from keyfold.core.times import iso
from keyfold.orders import metrics
from keyfold.orders.model import Identity, Property, UnitState, could_both_match, matches
from keyfold.orders.service.reading import CellKey, Query, cells_of, columns_of, is_complete, must_be_known
from keyfold.orders.service.unit import Unit

CHECKED_MAX = 100  # identities of one check
# Of the identity, the order and the filters of a place, which are its key: PostgreSQL has room for 2,704 in an index,
# with what it keeps of its own.
HELD_BYTES_MAX = 2_600


class Check(Struct, frozen=True):
    """What is asked: exactly one of `fewer_than` and `at_least`."""

    identities: Sequence[Identity]
    filters: Sequence[Property] = ()
    fewer_than: int | None = None
    at_least: int | None = None
    order_id: str | None = None  # the order that a place is to be held for
    reserve_seconds: int = 0
    allow_incomplete: bool = False

    @property
    def filter_values(self) -> dict[str, str]:
        return {each.name: each.value for each in self.filters}

    @property
    def filter_text(self) -> str:
        """The filters as a place is stored with them."""
        return msgspec.json.encode(self.filter_values, order="sorted").decode()


class CheckedIdentity(Struct, frozen=True):
    """How many orders an identity has under the filter, and for how many others places are held."""

    identity: Identity
    counter_value: int
    reserved: int


class Checked(Struct, frozen=True):
    """The answer to a check."""

    allowed: bool
    reason: str  # empty where it is allowed
    identities: list[CheckedIdentity]
    reserved_until: str | None = None


class Held(Struct, frozen=True):
    """A place that is held."""

    order_id: str
    filters: Mapping[str, str]
    expires_at_us: int


Places = dict[CellKey, list[Held]]


def must_be_check(state: UnitState, unit: Unit, check: Check) -> None:
    """Refuse a check that makes no sense."""
    must_be_known(state, Query(check.identities, check.filters))
    if (check.fewer_than is None) == (check.at_least is None):
        raise BadInput("a check needs `fewer_than` or `at_least`, one of them")
    if check.order_id is None:
        return
    if check.fewer_than is None:
        raise BadInput("a place can be held only by a check of `fewer_than`", place="reserve")
    if not 1 <= check.reserve_seconds <= unit.settings.reserve_seconds_max:
        raise BadInput(
            f"a place can be held for 1 to {unit.settings.reserve_seconds_max} seconds", place="reserve.seconds"
        )
    longest = max(_bytes(each.value) for each in check.identities)
    if longest + _bytes(check.order_id) + _bytes(check.filter_text) > HELD_BYTES_MAX:
        raise BadInput(
            f"an identity, the order and the filters of a place are together longer than {HELD_BYTES_MAX} bytes",
            place="filters",
            hint="Filter by fewer properties, or check without `reserve`",
        )


def _bytes(text: str) -> int:
    """Of text that the store may yet refuse, too."""
    return len(text.encode(errors="surrogatepass"))


def check_orders(tx: Transaction, unit: Unit, checks: Sequence[Check]) -> list[Checked | KeyfoldError]:
    """Answer checks, one after the other: a place that the first takes is taken for the second."""
    state = unit.stood(tx).state
    ids = {each.name: each.type_id for each in state.identities}
    reserving = [_keys(ids, check) for check in checks if check.order_id is not None]
    if reserving:
        gates = columns_of([key for keys in reserving for key in keys])
        increment(tx, unit.tables.gates, {**gates, "version": [1] * len(gates["identity_type"])})
    keys = [key for check in checks for key in _keys(ids, check)]
    # Places before counts: an order that is counted in between is then seen twice, and never not at all.
    places = _places(tx, unit, keys)
    cells, values = cells_of(tx, unit, keys)

    def count(key: CellKey, check: Check) -> int:
        return sum(orders for slice_id, orders in cells.get(key, ()) if matches(values[slice_id], check.filters))

    counted = _counted(tx, unit, [check.order_id for check in checks if check.order_id is not None])
    answers: list[Checked | KeyfoldError] = []
    taken: list[tuple[CellKey, Check]] = []
    for check in checks:
        if check.order_id in counted:
            answers.append(Conflict(f"the order {check.order_id!r} was counted already", place="reserve.order_id"))
            continue
        answer = _answer(state, check, _keys(ids, check), count, places, tx.now_us)
        if answer.allowed and check.order_id is not None:
            for key in dict.fromkeys(_keys(ids, check)):
                places.setdefault(key, []).append(Held(check.order_id, check.filter_values, _until(check, tx.now_us)))
                taken.append((key, check))
        answers.append(answer)
    _hold(tx, unit, taken)
    allowed = [answer.allowed for answer in answers if isinstance(answer, Checked)]
    tx.after_commit.append(lambda: _measure(unit, allowed))
    return answers


def release(tx: Transaction, unit: Unit, order_ids: Sequence[str]) -> int:
    """Give back the places that are held for orders which will not come; returns how many."""
    return delete(tx, unit.tables.reservations, {"order_id": sorted(set(order_ids))})


def _keys(ids: Mapping[str, int], check: Check) -> list[CellKey]:
    return [(ids[each.type], each.value) for each in check.identities]


def _answer(
    state: UnitState,
    check: Check,
    keys: Sequence[CellKey],
    count: Callable[[CellKey, Check], int],
    places: Places,
    now_us: int,
) -> Checked:
    seen = [
        CheckedIdentity(
            identity,
            count(key, check),
            _held_by_others(places.get(key, ()), check),
        )
        for identity, key in zip(check.identities, keys, strict=True)
    ]
    reason = _incomplete(state, check) or _refusal(check, seen)
    until = None
    if not reason and check.order_id is not None:
        until = iso(min(_held_until(places.get(key, ()), check, now_us) for key in keys))
    return Checked(not reason, reason, seen, until)


def _held_by_others(places: Sequence[Held], check: Check) -> int:
    wanted = check.filter_values
    return len(
        {each.order_id for each in places if each.order_id != check.order_id and could_both_match(each.filters, wanted)}
    )


def _held_until(places: Sequence[Held], check: Check, now_us: int) -> int:
    """A place that the order has for longer is not made shorter: whoever was told so may rely on it."""
    own = (each for each in places if each.order_id == check.order_id and each.filters == check.filter_values)
    return max([_until(check, now_us), *(each.expires_at_us for each in own)])


def _until(check: Check, now_us: int) -> int:
    return now_us + check.reserve_seconds * SECOND_US


def _incomplete(state: UnitState, check: Check) -> str:
    if check.allow_incomplete:
        return ""
    asked = {each.type for each in check.identities}
    pending = sorted(each.name for each in state.identities if each.name in asked and not is_complete(each))
    return f"the history of {', '.join(pending)} is not counted yet" if pending else ""


def _refusal(check: Check, seen: Sequence[CheckedIdentity]) -> str:
    for each in seen:
        count = each.counter_value
        if check.fewer_than is not None and count + each.reserved >= check.fewer_than:
            held = f" and places held for {each.reserved} more" if each.reserved else ""
            return f"{each.identity.type} has {count} orders{held}, fewer than {check.fewer_than} are needed"
        if check.at_least is not None and count < check.at_least:
            return f"{each.identity.type} has {count} orders, at least {check.at_least} are needed"
    return ""


def _places(tx: Transaction, unit: Unit, keys: Sequence[CellKey]) -> Places:
    places: Places = {}
    decode = msgspec.json.Decoder(dict[str, str]).decode
    for key, (expires_at_us,) in load(tx, unit.tables.reservations, columns_of(keys), ("expires_at_us",)).items():
        if expires_at_us > tx.now_us:
            places.setdefault((key[0], key[1]), []).append(Held(key[2], decode(key[3]), expires_at_us))
    return places


def _counted(tx: Transaction, unit: Unit, order_ids: Sequence[str]) -> set[str]:
    return {order_id for (order_id,) in load(tx, unit.tables.marks, {"order_id": sorted(set(order_ids))}, ())}


def _hold(tx: Transaction, unit: Unit, taken: Sequence[tuple[CellKey, Check]]) -> None:
    """Store the places; asked for again, they are held from now on, and never for less than before."""
    if not taken:
        return
    columns: Columns = {
        "identity_type": [key[0] for key, _ in taken],
        "identity_value": [key[1] for key, _ in taken],
        "order_id": [check.order_id for _, check in taken],
        "filters": [check.filter_text for _, check in taken],
        "expires_at_us": [_until(check, tx.now_us) for _, check in taken],
    }
    increment(tx, unit.tables.reservations, columns, greatest=["expires_at_us"])


def _measure(unit: Unit, allowed: Sequence[bool]) -> None:
    for each in allowed:
        metrics.CHECKS.labels(unit.name, "allowed" if each else "refused").inc()
