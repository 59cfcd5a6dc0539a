"""What Schemathesis must know of our API that a schema cannot say."""

from typing import Any

import schemathesis

LARGE = 2**40


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Numbers as we mean them: 1.0 is no integer, and sums of the valid numbers of a run stay within 64 bits."""
    return _meant(_without_nul(body) if isinstance(body, dict) and "events" in body else body)


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
        return value % LARGE
    return value
