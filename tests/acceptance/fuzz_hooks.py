"""What Schemathesis must know of our API that a schema cannot say."""

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """JSON Schema takes 1.0 for an integer; we do not, as beyond 2**53 it would be another number than was meant."""
    return _integral(body)


def _integral(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _integral(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_integral(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
