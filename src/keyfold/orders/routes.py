"""The endpoints of order statistics: counts as the document asks for them, completed orders, checks, corrections."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

from msgspec import Meta, Struct

from keyfold.core.context import Context
from keyfold.core.errors import BadInput, Conflict, KeyfoldError, TooLarge
from keyfold.core.gather import Ask, Operation, Outcome, Question
from keyfold.core.route import Route
from keyfold.core.store import Transaction
from keyfold.orders.model import CompletedOrder, DimensionPending, Identity, Property, Text
from keyfold.orders.service.checking import CHECKED_MAX, Check, Checked, check_orders, must_be_check, release
from keyfold.orders.service.correcting import CORRECTIONS_MAX, Corrected, correct_orders
from keyfold.orders.service.counting import Verdict, count_orders, must_be_orders
from keyfold.orders.service.keeping import KeptOrder, kept_orders
from keyfold.orders.service.lagging import Lag
from keyfold.orders.service.reading import (
    Evidence,
    IdentityData,
    Query,
    evidence_of,
    lookup_of,
    must_be_known,
    read_many,
)
from keyfold.orders.service.unit import Unit, Units, opened

Work = Callable[[Transaction, Unit, Sequence[Ask]], list[Outcome]]  # of the asks for one unit
UnitName = Annotated[str, Meta(min_length=1, max_length=30, pattern=r"^[^\x00]*$", description="which unit")]


class UnitQuery(Struct, frozen=True, forbid_unknown_fields=True):
    unit: UnitName = "rides"


class OrdersQuery(Struct, frozen=True, forbid_unknown_fields=True):
    unit: UnitName = "rides"
    evidence: Annotated[bool, Meta(description="tell with each identity what its counts rest on")] = False


class OrdersBody(Struct, frozen=True, forbid_unknown_fields=True):
    identities: Annotated[list[Identity], Meta(min_length=1, description="whose orders")]
    filters: Annotated[
        list[Property], Meta(max_length=50, description="all must hold; at most one value for each property")
    ]
    group_by: Annotated[list[Text], Meta(max_length=50, description="by what the counts are to be told apart")]


class OrdersAnswer(Struct, frozen=True):
    """The counts of each identity, in the order asked for."""

    data: list[IdentityData]


class CompletedBody(Struct, frozen=True, forbid_unknown_fields=True):
    orders: Annotated[list[CompletedOrder], Meta(min_length=1, description="orders that were completed")]


class NotCounted(Struct, frozen=True):
    order_id: str
    reason: str


class CompletedAnswer(Struct, frozen=True, omit_defaults=True):
    """What became of the orders; `conflicts` are ids under which another order was counted."""

    accepted: int
    duplicates: int
    late: int
    before_start: int
    conflicts: list[str]
    set_aside: list[NotCounted] = []


class Reserve(Struct, frozen=True, forbid_unknown_fields=True):
    order_id: Text
    seconds: Annotated[int, Meta(ge=1, le=30 * 86_400, description="how long the place is held")] = 600


class CheckBody(Struct, frozen=True, forbid_unknown_fields=True):
    identities: Annotated[list[Identity], Meta(min_length=1, max_length=CHECKED_MAX, description="every one must pass")]
    filters: Annotated[list[Property], Meta(max_length=50)] = []
    fewer_than: Annotated[Annotated[int, Meta(ge=1, le=2**31)] | None, Meta(description="orders that are allowed")] = (
        None
    )
    at_least: Annotated[Annotated[int, Meta(ge=1, le=2**31)] | None, Meta(description="orders that are needed")] = None
    reserve: Annotated[Reserve | None, Meta(description="hold a place for this order (needs the scope ingest)")] = None
    allow_incomplete: Annotated[bool, Meta(description="answer although history is not counted yet")] = False


class ReleaseBody(Struct, frozen=True, forbid_unknown_fields=True):
    order_ids: Annotated[list[Text], Meta(min_length=1, max_length=1_000)]


class Released(Struct, frozen=True):
    released: int


class CorrectionsBody(Struct, frozen=True, forbid_unknown_fields=True):
    order_ids: Annotated[list[Text], Meta(min_length=1, max_length=CORRECTIONS_MAX)]
    reason: Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\x00]*$", description="no personal data")]


class Corrections(Struct, frozen=True):
    orders: list[Corrected]


class KeptQuery(Struct, frozen=True, forbid_unknown_fields=True):
    unit: UnitName = "rides"
    why: Literal["any", "late", "before_start", "set_aside"] = "any"
    after: Annotated[str, Meta(max_length=200, pattern=r"^[^\x00]*$", description="the order_id to go on behind")] = ""
    limit: Annotated[
        int, Meta(ge=1, le=1_000, description="about how many; one kept for several reasons is never torn apart")
    ] = 100


class Kept(Struct, frozen=True):
    """Orders that were not counted, or not for all their identities."""

    orders: list[KeptOrder]


def routes(context: Context) -> list[Route]:
    units, lag = opened(context), Lag(context)
    post = partial(Route, method="POST", query=UnitQuery)
    change = partial(post, idempotent=True)
    return [
        post(
            path="/v1/orders",
            summary="Count orders by identity and properties",
            scope="read",
            body=OrdersBody,
            query=OrdersQuery,
            answer=OrdersAnswer,
            run=_reading(context, units, lag),
            errors=(DimensionPending,),
        ),
        change(
            path="/v1/orders/completed",
            summary="Take in completed orders",
            scope="ingest",
            body=CompletedBody,
            answer=CompletedAnswer,
            run=_counting(context, units),
        ),
        post(
            path="/v1/orders/check",
            summary="Check for the first N orders, and hold a place",
            scope="read",
            body=CheckBody,
            answer=Checked,
            run=_checking(units),
            errors=(Conflict,),
        ),
        change(
            path="/v1/orders/release",
            summary="Give back places that were held",
            scope="ingest",
            body=ReleaseBody,
            answer=Released,
            run=_releasing(units),
        ),
        change(
            path="/v1/orders/corrections",
            summary="Take back orders counted by mistake",
            scope="admin",
            body=CorrectionsBody,
            answer=Corrections,
            run=_correcting(units),
        ),
        Route(
            method="GET",
            path="/v1/orders/kept",
            summary="List orders that were not counted",
            scope="admin",
            query=KeptQuery,
            answer=Kept,
            run=_keeping(context, units),
        ),
    ]


def _unit(units: Units, ask: Ask) -> Unit:
    """A unit that the token does not name is not there."""
    ask.client.must_see("unit", [ask.query.unit])
    return units[ask.query.unit]


def _gathered(
    units: Units,
    name: str,
    work: Work,
    *,
    items: str,
    writes: bool = True,
    check: Callable[[Ask], None] | None = None,
    key: Callable[[Ask], str] = lambda _: "",
    is_apart: Callable[[Ask], bool] = lambda _: False,
    question: Callable[[Ask], Question | None] | None = None,
) -> Operation:
    """An operation on units that the token names; `items` is the list in the body that makes a request heavy."""

    def check_all(ask: Ask) -> None:
        _unit(units, ask)
        if check is not None:
            check(ask)

    return Operation(
        name=name,
        apply=lambda tx, asks: _by_unit(units, tx, asks, work),
        writes=writes,
        check=check_all,
        weight=lambda ask: len(getattr(ask.body, items)),
        key=key,
        is_apart=is_apart,
        question=question,
    )


def _at_most(items_max: int, items: str) -> Callable[[Ask], None]:
    def check(ask: Ask) -> None:
        if (count := len(getattr(ask.body, items))) > items_max:
            raise TooLarge(f"{count} {items}, {items_max} are allowed", place=items)

    return check


def _by_unit(units: Units, tx: Transaction, asks: Sequence[Ask], work: Work) -> list[Outcome]:
    """The outcomes of asks, each unit's together."""
    places: dict[str, list[int]] = {}
    for index, ask in enumerate(asks):
        places.setdefault(ask.query.unit, []).append(index)
    outcomes: list[Outcome] = [None] * len(asks)
    for name in sorted(places):
        for index, outcome in zip(places[name], work(tx, units[name], [asks[i] for i in places[name]]), strict=True):
            outcomes[index] = outcome
    return outcomes


def _first_identity(ask: Ask) -> str:
    identities: list[Identity] = ask.body.identities
    return identities[0].value


def _reading(context: Context, units: Units, lag: Lag) -> Operation:
    def work(tx: Transaction, unit: Unit, asks: Sequence[Ask]) -> list[Outcome]:
        state = unit.seen(tx).state
        wrong: dict[int, KeyfoldError] = {}
        good: list[tuple[int, Query]] = []
        for index, ask in enumerate(asks):
            query = Query(ask.body.identities, ask.body.filters, ask.body.group_by)
            try:
                must_be_known(state, query)
                good.append((index, query))
            except KeyfoldError as error:
                wrong[index] = error
        # Evidence before counts: what came in between is then counted, and never neither counted nor told of.
        proven = {at: _evidence(tx, unit, lag, query) for at, query in good if asks[at].query.evidence}
        read = dict(zip([at for at, _ in good], read_many(tx, unit, [query for _, query in good]), strict=True))
        return [wrong[at] if at in wrong else _answered(read[at], proven.get(at)) for at in range(len(asks))]

    def question(ask: Ask) -> Question | None:
        if ask.query.evidence:
            return None
        found = lookup_of(units[ask.query.unit], Query(ask.body.identities, ask.body.filters, ask.body.group_by))
        if found is None:
            return None
        few, answered = found
        return Question(
            few.sql,
            few.parameters,
            lambda rows: None if (data := answered(rows)) is None else OrdersAnswer(data),
        )

    return _gathered(
        units,
        "orders read",
        work,
        items="identities",
        writes=False,
        check=_at_most(context.limits.batch_items_max, "identities"),
        key=_first_identity,
        is_apart=lambda ask: ask.query.evidence,  # it may wait for the topic, which counts do not need
        question=question,
    )


def _evidence(tx: Transaction, unit: Unit, lag: Lag, query: Query) -> list[Evidence]:
    waiting = lag.messages(unit)
    return evidence_of(tx, unit, query.identities, waiting)


def _answered(read: list[IdentityData], evidence: list[Evidence] | None) -> OrdersAnswer:
    if evidence is None:
        return OrdersAnswer(read)
    return OrdersAnswer([IdentityData(one.identity, one.data, two) for one, two in zip(read, evidence, strict=True)])


def _counting(context: Context, units: Units) -> Operation:
    def work(tx: Transaction, unit: Unit, asks: Sequence[Ask]) -> list[Outcome]:
        wrong: dict[int, KeyfoldError] = {}
        for index, ask in enumerate(asks):
            try:
                must_be_orders(tx, unit, ask.body.orders)
            except BadInput as error:
                wrong[index] = error
        good = [ask.body.orders for index, ask in enumerate(asks) if index not in wrong]
        verdicts = iter(count_orders(tx, unit, [order for orders in good for order in orders]))
        return [
            wrong[index] if index in wrong else _told([next(verdicts) for _ in ask.body.orders])
            for index, ask in enumerate(asks)
        ]

    return _gathered(
        units,
        "orders count",
        work,
        items="orders",
        check=_at_most(context.limits.batch_items_max, "orders"),
        key=lambda ask: ask.body.orders[0].order_id,
    )


def _told(verdicts: Sequence[Verdict]) -> CompletedAnswer:
    statuses = [each.status for each in verdicts]
    return CompletedAnswer(
        accepted=statuses.count("accepted"),
        duplicates=statuses.count("duplicate"),
        late=statuses.count("late"),
        before_start=statuses.count("before_start"),
        conflicts=[each.order_id for each in verdicts if each.status == "conflict"],
        set_aside=[NotCounted(each.order_id, each.reason) for each in verdicts if each.status == "set_aside"],
    )


def _checking(units: Units) -> Operation:
    def check(ask: Ask) -> None:
        if ask.body.reserve is not None:
            ask.client.must_have("ingest")

    def work(tx: Transaction, unit: Unit, asks: Sequence[Ask]) -> list[Outcome]:
        state = unit.stood(tx).state
        wrong: dict[int, KeyfoldError] = {}
        checks: list[Check] = []
        for index, ask in enumerate(asks):
            wanted = _check(ask.body)
            try:
                must_be_check(state, unit, wanted)
                checks.append(wanted)
            except KeyfoldError as error:
                wrong[index] = error
        answers = iter(check_orders(tx, unit, checks))
        return [wrong[index] if index in wrong else next(answers) for index in range(len(asks))]

    return _gathered(units, "orders check", work, items="identities", check=check, key=_first_identity)


def _check(body: CheckBody) -> Check:
    return Check(
        identities=body.identities,
        filters=body.filters,
        fewer_than=body.fewer_than,
        at_least=body.at_least,
        order_id=None if body.reserve is None else body.reserve.order_id,
        reserve_seconds=0 if body.reserve is None else body.reserve.seconds,
        allow_incomplete=body.allow_incomplete,
    )


def _releasing(units: Units) -> Operation:
    def work(tx: Transaction, unit: Unit, asks: Sequence[Ask]) -> list[Outcome]:
        return [Released(release(tx, unit, ask.body.order_ids)) for ask in asks]

    return _gathered(units, "orders release", work, items="order_ids")


def _correcting(units: Units) -> Operation:
    def work(tx: Transaction, unit: Unit, asks: Sequence[Ask]) -> list[Outcome]:
        return [
            Corrections(correct_orders(tx, unit, ask.body.order_ids, ask.body.reason, ask.client.name)) for ask in asks
        ]

    return _gathered(units, "orders correct", work, items="order_ids")


def _keeping(context: Context, units: Units) -> Callable[[Ask], Outcome]:
    def run(ask: Ask) -> Outcome:
        unit, query = _unit(units, ask), ask.query
        why = None if query.why == "any" else query.why
        return Kept(context.store.read(lambda tx: kept_orders(tx, unit, why, query.after, query.limit)))

    return run
