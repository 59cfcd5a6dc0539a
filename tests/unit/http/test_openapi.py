"""The document says of every route what it takes, what it answers and how it fails, from the types that validate."""

from typing import Any

import jsonschema_rs
import pytest
from msgspec import structs

from keyfold.core.errors import KeyfoldError
from keyfold.http import openapi
from tests.unit.http import trial
from tests.unit.http.conftest import Caller

pytestmark = pytest.mark.spec("CORE-18")


@pytest.fixture
def document(caller: Caller) -> Any:
    return caller("GET", "/openapi.json", token=None).json


def operation(document: Any, method: str, path: str) -> Any:
    return document["paths"][path][method.lower()]


def names(found: Any, place: str, document: Any) -> set[str]:
    resolved = [
        document["components"]["parameters"][each["$ref"].rpartition("/")[2]] if "$ref" in each else each
        for each in found["parameters"]
    ]
    return {each["name"] for each in resolved if each["in"] == place}


def test_every_route_is_there_with_its_summary_tag_and_scope(caller: Caller, document: Any) -> None:
    for route in trial.routes(caller.context):
        found = operation(document, route.method, route.path)
        assert found["summary"] == route.summary
        assert found["security"] == [{"bearer": [route.scope]}]
        assert f"`{route.scope}`" in found["description"]
        assert str(route.status) in found["responses"]
        assert set(found["tags"]) <= {tag["name"] for tag in document["tags"]}


def test_operation_ids_are_distinct(document: Any) -> None:
    ids = [found["operationId"] for item in document["paths"].values() for found in item.values()]
    assert len(set(ids)) == len(ids)


def test_the_types_that_validate_are_the_schemas(document: Any) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["AddBody"]["additionalProperties"] is False
    assert schemas["Item"]["properties"]["add"]["maximum"] == 2**63 - 1
    body = operation(document, "POST", "/v1/trials")["requestBody"]
    assert body["required"] is True
    assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/AddBody"}


def test_every_reference_leads_somewhere(document: Any) -> None:
    references = [str(node["$ref"]) for node in openapi._nodes(document) if isinstance(node.get("$ref"), str)]
    assert len(references) > 50
    for reference in references:
        found = document
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]


def test_every_schema_is_a_schema(document: Any) -> None:
    for schema in document["components"]["schemas"].values():
        jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})


def test_path_query_and_header_parameters_are_those_of_the_route(document: Any) -> None:
    edit = operation(document, "PUT", "/v1/trials/{key}")
    assert names(edit, "path", document) == {"key"}
    assert names(edit, "header", document) == {"If-Match", "Idempotency-Key", "X-Request-Id"}
    read = operation(document, "GET", "/v1/trials/{key}")
    assert names(read, "query", document) == {"limit", "factor", "after"}
    assert names(read, "header", document) == {"X-Request-Id"}


def test_a_query_parameter_has_the_bounds_default_and_example_of_its_field(document: Any) -> None:
    [limit] = [
        each for each in operation(document, "GET", "/v1/trials/{key}")["parameters"] if each.get("name") == "limit"
    ]
    assert limit["required"] is False
    assert limit["description"] == "how many at most"
    assert limit["schema"] == {"type": "integer", "minimum": 1, "maximum": 100, "default": 10, "examples": [10]}


def test_a_query_parameter_is_left_out_rather_than_null(document: Any) -> None:
    [after] = [
        each for each in operation(document, "GET", "/v1/trials/{key}")["parameters"] if each.get("name") == "after"
    ]
    assert after["schema"]["type"] == "string"


@pytest.mark.spec("CORE-13")
def test_every_error_that_a_route_can_answer_is_a_problem_in_the_document(caller: Caller, document: Any) -> None:
    for route in trial.routes(caller.context):
        responses = operation(document, route.method, route.path)["responses"]
        for error in openapi.errors_of(route):
            found = responses[str(error.status)]
            assert f"/problems/{error.slug}" in found["description"]
            assert found["content"]["application/problem+json"]["schema"] == {"$ref": "#/components/schemas/Problem"}


@pytest.mark.parametrize(
    ("method", "path", "statuses"),
    [
        (
            "POST",
            "/v1/trials",
            {"200", "400", "401", "403", "404", "408", "409", "413", "414", "415", "429", "500", "503"},
        ),
        ("GET", "/v1/trials/{key}", {"200", "400", "401", "403", "404", "414", "429", "500", "503"}),
        (
            "PUT",
            "/v1/trials/{key}",
            {"200", "400", "401", "403", "404", "408", "409", "412", "413", "414", "415", "428", "429", "500", "503"},
        ),
    ],
)
def test_the_statuses_are_those_that_apply(document: Any, method: str, path: str, statuses: set[str]) -> None:
    assert set(operation(document, method, path)["responses"]) == statuses


def test_the_headers_of_answers_are_told(document: Any) -> None:
    edit = operation(document, "PUT", "/v1/trials/{key}")["responses"]
    assert {"ETag", "X-Request-Id"} <= set(edit["200"]["headers"])
    assert "WWW-Authenticate" in edit["401"]["headers"]
    assert "Retry-After" in edit["429"]["headers"]
    assert "Retry-After" in edit["503"]["headers"]


def test_texts_of_a_request_are_told_to_hold_no_nul(document: Any) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["Item"]["properties"]["key"]["pattern"] == openapi.NO_NUL
    assert schemas["ReadBody"]["properties"]["keys"]["items"]["pattern"] == openapi.NO_NUL
    assert "pattern" not in schemas["Trial"]["properties"]["key"]


def test_the_servers_own_endpoints_are_there(document: Any) -> None:
    assert document["paths"]["/healthz"]["get"]["security"] == []
    assert document["paths"]["/metrics"]["get"]["security"] == [{"bearer": ["metrics"]}]


@pytest.mark.spec("CORE-13")
def test_a_problem_of_the_server_fits_the_schema_of_problems(caller: Caller, document: Any) -> None:
    schema = {**document["components"]["schemas"]["Problem"], "components": document["components"]}
    validator = jsonschema_rs.Draft202012Validator(schema)
    for answer in (
        caller("GET", "/nowhere"),
        caller("GET", "/v1/broken"),
        caller("PUT", "/v1/trials/a", json={"value": 1}),
    ):
        validator.validate(answer.json)


def test_an_error_named_by_a_route_is_in_the_document(caller: Caller) -> None:
    class Peculiar(KeyfoldError):
        """A peculiar thing"""

        slug = "peculiar"
        status = 422

    route = structs.replace(trial.routes(caller.context)[0], errors=(Peculiar,))
    responses: Any = openapi.document([route])["paths"]
    assert "A peculiar thing" in responses["/v1/trials"]["post"]["responses"]["422"]["description"]
