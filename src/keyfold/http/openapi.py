"""The OpenAPI 3.1 document, made from the routes and the very types that validate their requests."""

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct, field

import keyfold
from keyfold.core.access import SCOPES
from keyfold.core.errors import (
    AddressTooLong,
    BadInput,
    IdempotencyConflict,
    Internal,
    KeyfoldError,
    NotFound,
    QueueFull,
    RateExceeded,
    ScopeMissing,
    Stopping,
    TooDeep,
    TooLarge,
    TooSlow,
    Unauthenticated,
    Unavailable,
    VersionNeeded,
    VersionStale,
    WrongMediaType,
)
from keyfold.core.route import Route
from keyfold.http.body import LINES_MEDIA
from keyfold.http.health import METRICS_TEXT, Health
from keyfold.http.problems import PROBLEM_JSON, Problem, type_of
from keyfold.http.shapes import is_open
from keyfold.http.wire import JSON_HEADERS, Answer, Call

Schema = dict[str, object]

REF = "#/components/schemas/{name}"
NO_NUL = "^[^\\u0000]*$"
_PART = re.compile(r"\{([a-z_]+)\}")

DESCRIPTION = """Exact, bounded state per key, folded from events.

Every call carries `Authorization: Bearer <token>`; `keyfold token create` makes a token. Its scopes say what it may do,
its grants what it may do it to; what it may not see answers 404.

Every error is a problem (RFC 9457): programs read its `type`, which never changes; `place` says where in the request
the fault lies.

A write takes an `Idempotency-Key`: when an answer was lost, the same request with the same key gets the first answer
again. A write that does not list the header keeps no answers and refuses a key. An edit takes `If-Match` with the ETag
of what was read; 412 means that somebody was faster."""

ALWAYS = (
    BadInput,
    AddressTooLong,
    Unauthenticated,
    ScopeMissing,
    NotFound,
    RateExceeded,
    Internal,
    Unavailable,
    QueueFull,
    Stopping,
)
WITH_BODY = (TooSlow, TooLarge, WrongMediaType)


class Described(Struct, frozen=True, kw_only=True):
    """An endpoint of the server itself, for the document."""

    path: str
    summary: str
    scope: str | None = None
    media: str = "application/json"
    answer: object = str
    errors: Sequence[type[KeyfoldError]] = field(default_factory=list)


OWN = (
    Described(path="/healthz", summary="Liveness", answer=Health, errors=[Internal]),
    Described(path="/readyz", summary="Readiness", answer=Health, errors=[Internal, Unavailable]),
    Described(
        path="/metrics",
        summary="Metrics for Prometheus",
        scope="metrics",
        media=METRICS_TEXT.decode().partition(";")[0],
        errors=[BadInput, Unauthenticated, ScopeMissing, RateExceeded, Internal, Unavailable],
    ),
)


class Document:
    """The document, encoded once."""

    template = "/openapi.json"

    def __init__(self, routes: Sequence[Route]) -> None:
        self._body = msgspec.json.encode(document(routes))

    async def answer(self, call: Call, params: Mapping[str, str]) -> Answer:
        return Answer(200, self._body, JSON_HEADERS)


def document(routes: Sequence[Route]) -> Schema:
    """The whole API as OpenAPI 3.1."""
    schemas = Schemas(routes)
    paths: dict[str, Schema] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, routes, schemas)
    for own in OWN:
        paths[own.path] = {"get": _own_operation(own, schemas)}
    tags = list(dict.fromkeys(_tag(route) for route in routes))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Keyfold", "version": keyfold.__version__, "description": DESCRIPTION},
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in [*tags, "server"]],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "parameters": PARAMETERS,
            "headers": HEADERS,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "kf_<id>_<secret>",
                    "description": "Scopes: " + "; ".join(f"`{name}` {what}" for name, what in SCOPES.items()),
                }
            },
        },
    }


class Schemas:
    """The schema of every type that goes in or out, named once."""

    def __init__(self, routes: Sequence[Route]) -> None:
        kinds = [(route.body, route.lines, route.query, route.path_type) for route in routes]
        taken = [kind for each in kinds for kind in each if kind is not None]
        given = [route.answer for route in routes if route.answer is not None] + [own.answer for own in OWN]
        self._kinds = [*taken, *given, Problem]
        self._schemas, components = msgspec.json.schema_components(self._kinds, ref_template=REF)
        self.components: dict[str, Schema] = dict(components)
        for name in self._reachable(taken):
            _forbid_nul(self.components[name])
        listed = {kind for route in routes for kind in (route.query, route.path_type) if kind is not None}
        self._listed = {name: self.components.pop(name) for name in map(self._name, listed)}

    def of(self, kind: object) -> Schema:
        return self._schemas[self._kinds.index(kind)]

    def of_parameters(self, kind: type[Struct]) -> Schema:
        return self._listed[self._name(kind)]

    def _name(self, kind: object) -> str:
        return str(self.of(kind)["$ref"]).rpartition("/")[2]

    def _reachable(self, kinds: Sequence[object]) -> set[str]:
        todo, found = [self._name(kind) for kind in kinds], set[str]()
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo.extend(_references(self.components[name]))
        return found


def _operation(route: Route, routes: Sequence[Route], schemas: Schemas) -> Schema:
    said = [route.description] if route.description else []
    operation: Schema = {
        "operationId": _operation_id(route.method, route.path),
        "summary": route.summary,
        "description": "\n\n".join([*said, f"Needs the scope `{route.scope}`."]),
        "tags": [_tag(route)],
        "security": [{"bearer": [route.scope]}],
        "parameters": _parameters(route, schemas),
        "responses": {str(route.status): _success(route, routes, schemas), **_failures(errors_of(route), schemas)},
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas.of(route.body)}},
        }
    if route.lines is not None:
        operation["requestBody"] = {
            "required": True,
            "description": "One document a line, of any number of lines; they are taken as they come.",
            "content": {
                LINES_MEDIA: {
                    "schema": {
                        "type": "string",
                        "contentMediaType": LINES_MEDIA,
                        "contentSchema": schemas.of(route.lines),
                    }
                }
            },
        }
    return operation


def _own_operation(own: Described, schemas: Schemas) -> Schema:
    return {
        "operationId": _operation_id("get", own.path),
        "summary": own.summary,
        "tags": ["server"],
        "security": [{"bearer": [own.scope]}] if own.scope else [],
        "parameters": [_reference("parameters", "X-Request-Id")],
        "responses": {
            "200": {
                "description": "The answer",
                "headers": _headers("X-Request-Id"),
                "content": {own.media: {"schema": schemas.of(own.answer)}},
            },
            **_failures(own.errors, schemas),
        },
    }


def errors_of(route: Route) -> list[type[KeyfoldError]]:
    """Every error that this route can answer."""
    errors: list[type[KeyfoldError]] = [*ALWAYS]
    if route.body is not None or route.lines is not None:
        errors += WITH_BODY
    if route.body is not None:
        errors += [TooDeep] if is_open(route.body) else []
    if route.idempotent:
        errors.append(IdempotencyConflict)
    if route.if_match:
        errors += [VersionStale, VersionNeeded]
    return list(dict.fromkeys([*errors, *route.errors]))


def _parameters(route: Route, schemas: Schemas) -> list[Schema]:
    found: list[Schema] = []
    if route.path_type is not None:
        found.extend(_listed_parameters(schemas.of_parameters(route.path_type), "path"))
    else:
        plain = {"type": "string", "minLength": 1, "pattern": NO_NUL}
        found.extend(
            {"name": name, "in": "path", "required": True, "schema": plain} for name in _PART.findall(route.path)
        )
    if route.query is not None:
        found.extend(_listed_parameters(schemas.of_parameters(route.query), "query"))
    if route.idempotent:
        found.append(_reference("parameters", "Idempotency-Key"))
    if route.if_match:
        found.append(_reference("parameters", "If-Match"))
    found.append(_reference("parameters", "X-Request-Id"))
    return found


def _listed_parameters(schema: Schema, where: str) -> Iterator[Schema]:
    properties: dict[str, Schema] = schema.get("properties", {})  # type: ignore[assignment]
    required: list[str] = schema.get("required", [])  # type: ignore[assignment]
    for name, kind in properties.items():
        described = dict(_without_null(kind))
        parameter: Schema = {"name": name, "in": where, "required": name in required}
        if "description" in described:
            parameter["description"] = described.pop("description")
        yield {**parameter, "schema": described}


def _without_null(kind: Schema) -> Schema:
    """A query leaves a name out; it has no null."""
    options = kind.get("anyOf")
    if not isinstance(options, list):
        return kind
    kept = [option for option in options if option != {"type": "null"}]
    rest = {name: value for name, value in kind.items() if name not in {"anyOf", "default"}}
    return {**rest, **kept[0]} if len(kept) == 1 else {**rest, "anyOf": kept}


def _success(route: Route, routes: Sequence[Route], schemas: Schemas) -> Schema:
    versioned = any(other.if_match and other.path == route.path for other in routes)
    response: Schema = {
        "description": "The answer",
        "headers": _headers("X-Request-Id", *(["ETag"] if versioned else [])),
    }
    if route.answer is not None and route.status != 204:
        response["content"] = {"application/json": {"schema": schemas.of(route.answer)}} | {
            media: {"schema": {"type": "string", "format": "binary"}} for media in route.media
        }
    return response


def _failures(errors: Sequence[type[KeyfoldError]], schemas: Schemas) -> dict[str, Schema]:
    by_status: dict[int, list[type[KeyfoldError]]] = {}
    for error in sorted(errors, key=lambda error: error.status):
        by_status.setdefault(error.status, []).append(error)
    return {
        str(status): {
            "description": ". ".join(f"{error.title()} (`{type_of(error)}`)" for error in group),
            "headers": _headers("X-Request-Id", *FAILURE_HEADERS.get(status, ())),
            "content": {PROBLEM_JSON.decode(): {"schema": schemas.of(Problem)}},
        }
        for status, group in by_status.items()
    }


FAILURE_HEADERS: Mapping[int, Sequence[str]] = {
    401: ("WWW-Authenticate",),
    429: ("Retry-After",),
    503: ("Retry-After",),
}
HEADERS: dict[str, Schema] = {
    "ETag": {"description": "the version, to be sent back in If-Match", "schema": {"type": "string"}},
    "Retry-After": {"description": "seconds to wait", "schema": {"type": "integer", "minimum": 1}},
    "WWW-Authenticate": {"schema": {"type": "string"}},
    "X-Request-Id": {"description": "the id under which logs know this request", "schema": {"type": "string"}},
}
PARAMETERS: dict[str, Schema] = {
    "Idempotency-Key": {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "a repeat with the same key and body gets the first answer; with another body 409",
        "schema": {"type": "string", "pattern": "^[!-~]{1,200}$", "maxLength": 200},
    },
    "If-Match": {
        "name": "If-Match",
        "in": "header",
        "required": True,
        "description": 'the ETag of what was read, such as `"7"`; `"0"` where it is not there yet',
        "schema": {"type": "string", "pattern": '^"(0|[1-9][0-9]{0,17})"$', "examples": ['"0"']},
    },
    "X-Request-Id": {
        "name": "X-Request-Id",
        "in": "header",
        "description": "an id of yours for this request, of up to 64 letters, digits and `._-`; others get one of ours",
        "schema": {"type": "string"},
    },
}


def _headers(*names: str) -> dict[str, Schema]:
    return {name: _reference("headers", name) for name in names}


def _reference(kind: str, name: str) -> Schema:
    return {"$ref": f"#/components/{kind}/{name}"}


def _operation_id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"[a-z0-9]+", path)])


def _tag(route: Route) -> str:
    return route.tag or route.path.split("/")[2]


def _forbid_nul(schema: Schema) -> None:
    """Say in the schema what the door does to every text."""
    for node in _nodes(schema):
        if node.get("type") == "string" and not node.keys() & {"pattern", "enum", "const", "format"}:
            node["pattern"] = NO_NUL
        if node.get("type") == "object" and isinstance(node.get("additionalProperties"), dict):
            node.setdefault("propertyNames", {"pattern": NO_NUL})


def _references(schema: Schema) -> list[str]:
    return [str(node["$ref"]).rpartition("/")[2] for node in _nodes(schema) if isinstance(node.get("$ref"), str)]


def _nodes(node: object) -> Iterator[Schema]:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _nodes(value)
    elif isinstance(node, list):
        for value in node:
            yield from _nodes(value)
