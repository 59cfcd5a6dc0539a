"""What Schemathesis must know of our API that a schema cannot say."""

import json
from typing import Any

import schemathesis

LARGE = 2**40


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Numbers as we mean them: 1.0 is no integer, and sums of the valid numbers of a run stay within 64 bits."""
    if isinstance(body, dict) and any(name in body for name in ("events", "state", "content", "filled", "opinions")):
        body = _without_nul(body)
    if isinstance(body, dict) and ("identities" in body or "orders" in body):
        body = _of_the_unit(body)
    if isinstance(body, dict) and "user_ids" in body:
        body = {**body, "user_ids": _ascending(body["user_ids"])}
    if isinstance(body, dict) and "source_table" in body and isinstance(body["source_table"], str):
        body = {
            **body,
            "source_table": "",
            "condition": "" if isinstance(body.get("condition"), str) else body.get("condition"),
        }
    return _meant(body)


@schemathesis.serializer("application/x-ndjson")
def lines(context: Any, value: Any) -> bytes:
    """One item a line."""
    items = value if isinstance(value, list) else [value]
    return b"".join(json.dumps(each).encode() + b"\n" for each in items)


def _ascending(ids: Any) -> Any:
    """Ids of a snapshot ascend, and are all numbers or all text, where they are ids at all: no schema says so."""
    if not isinstance(ids, list) or not all(type(each) is int or isinstance(each, str) for each in ids):
        return ids
    alike = [each for each in ids if isinstance(each, str) == isinstance(ids[0], str)]
    return sorted(set(alike), key=lambda each: each.encode(errors="replace") if isinstance(each, str) else each)


def _without_nul(value: Any) -> Any:
    """No schema can say of fields that anyone may add that their text holds no NUL."""
    if isinstance(value, dict):
        return {name.replace("\0", ""): _without_nul(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_nul(item) for item in value]
    return value.replace("\0", "") if isinstance(value, str) else value


def _meant(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _meant(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_meant(item) for item in value]
    # JSON Schema takes 1.0 for an integer. We do not: beyond 2**53 it would be another number than was meant.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # Whether a sum still fits depends on what is stored, which no schema knows; numbers out of range stay so.
    if type(value) is int and abs(value) > LARGE and -(2**63) <= value < 2**63:
        return value % LARGE or 1
    return value


IDENTITIES = ("phone_id", "yandex_uid", "card_id", "device_id")
DIMENSIONS = ("tariff", "brand", "payment_method_type")


def _of_the_unit(body: dict[str, Any]) -> dict[str, Any]:
    """Names that the unit has, where a name was given: which ones there are is data. What is no name stays as it is."""
    body = dict(body)
    _each(body, "identities", lambda each: {**each, "type": _known(each.get("type"), IDENTITIES)})
    _each(body, "filters", lambda each: {**each, "name": _known(each.get("name"), DIMENSIONS)})
    if _is_list(body.get("filters"), dict):
        body["filters"] = list({str(each.get("name")): each for each in body["filters"]}.values())
    if _is_list(body.get("group_by"), str):
        body["group_by"] = list(dict.fromkeys(_known(each, DIMENSIONS) for each in body["group_by"]))
    _each(body, "orders", _order_of_the_unit)
    return _one_question(body)


def _order_of_the_unit(order: dict[str, Any]) -> dict[str, Any]:
    order = dict(order)
    for field, known in (("identities", IDENTITIES), ("properties", DIMENSIONS)):
        if isinstance(order.get(field), dict):
            order[field] = {_known(name, known): value for name, value in order[field].items()}
    if isinstance(order.get("created_at"), str) and order["created_at"][:4] > "2020":
        order["created_at"] = "2020" + order["created_at"][4:].replace("02-29", "02-28")
    return order


def _one_question(body: dict[str, Any]) -> dict[str, Any]:
    """A check asks one thing, and holds a place only by the first: no schema of ours says so."""
    asked = [body.get(name) for name in ("fewer_than", "at_least")]
    if "group_by" in body or any(each is not None and type(each) is not int for each in asked):
        return body
    if (asked[0] is None) == (asked[1] is None) or (body.get("reserve") is not None and asked[0] is None):
        body |= {"fewer_than": asked[0] or asked[1] or 1, "at_least": None}
    reserve = body.get("reserve")
    if isinstance(reserve, dict) and type(reserve.get("seconds")) is int and reserve["seconds"] <= 30 * 86_400:
        body["reserve"] = {**reserve, "seconds": min(reserve["seconds"], 86_400)}
    return body


def _known(name: Any, known: tuple[str, ...]) -> Any:
    is_name = isinstance(name, str) and 1 <= len(name) <= 200 and "\0" not in name
    return known[sum(map(ord, name)) % len(known)] if is_name else name


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _each(body: dict[str, Any], name: str, change: Any) -> None:
    if _is_list(body.get(name), dict):
        body[name] = [change(each) for each in body[name]]
