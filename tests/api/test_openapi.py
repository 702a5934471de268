"""The OpenAPI document tells the truth about every route, and the page that shows it loads nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from fluxmesh.submission import FIELDS
from tests.api.serving import Api

CONTRACT = {
    "/api/v1/jobs": {"get", "post"},
    "/api/v1/jobs/bulk": {"post"},
    "/api/v1/jobs/{job_id}": {"get"},
    "/api/v1/jobs/{job_id}/history": {"get"},
    "/api/v1/jobs/{job_id}/wait": {"get"},
    "/api/v1/jobs/{job_id}/cancel": {"post"},
    "/api/v1/jobs/{job_id}/retry": {"post"},
    "/api/v1/jobs/{job_id}/reprioritise": {"post"},
    "/api/v1/dlq": {"get"},
    "/api/v1/dlq/groups": {"get"},
    "/api/v1/dlq/replay": {"post"},
    "/api/v1/dlq/{job_id}/replay": {"post"},
    "/api/v1/dlq/{job_id}/discard": {"post"},
    "/api/v1/workers": {"get"},
    "/api/v1/queues": {"get"},
    "/api/v1/queues/{queue}/pause": {"post"},
    "/api/v1/queues/{queue}/resume": {"post"},
    "/api/v1/metrics": {"get"},
    "/api/v1/mesh": {"get"},
    "/api/v1/mesh/ring": {"get"},
    "/api/v1/mesh/owner": {"get"},
    "/healthz": {"get"},
    "/readyz": {"get"},
}
ROUTES = [(path, method) for path, methods in CONTRACT.items() for method in sorted(methods)]


@pytest.fixture(scope="module")
def document(api: Api) -> dict[str, Any]:
    found: dict[str, Any] = api.client.get("/openapi.json").json()
    return found


@pytest.fixture(scope="module")
def described(api: Api, document: dict[str, Any]) -> Any:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=str(api.client.base_url))
    return schema


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["good", "bad"])
@pytest.mark.parametrize(("path", "method"), ROUTES)
def test_no_request_is_answered_otherwise_than_the_document_says(
    described: Any, path: str, method: str, mode: GenerationMode
) -> None:
    @settings(
        max_examples=10,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if path.endswith("/wait") and mode is GenerationMode.POSITIVE:
            case.query = {"timeout": 0}
        # ISO times, and fields that exclude each other, are beyond a schema.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # a route that nothing can be sent to wrongly


def test_the_document_has_the_routes_of_the_contract(document: dict[str, Any]) -> None:
    assert {path: set(methods) for path, methods in document["paths"].items()} == CONTRACT


def test_the_schema_of_a_submission_has_its_fields(document: dict[str, Any]) -> None:
    assert set(document["components"]["schemas"]["Submission"]["properties"]) == set(FIELDS)


def test_every_reference_leads_somewhere(document: dict[str, Any], api: Api) -> None:
    text = api.client.get("/openapi.json").text
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names <= set(document["components"]["schemas"])
    assert "Submission" in names


def test_the_examples_are_accepted(document: dict[str, Any], api: Api) -> None:
    for path in ("/api/v1/jobs", "/api/v1/jobs/bulk", "/api/v1/dlq/replay"):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        for example in content["examples"].values():
            assert api.client.post(path, json=example["value"]).status_code in (200, 201)


def test_the_page_of_the_routes_loads_nothing(api: Api) -> None:
    answer = api.client.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in CONTRACT:
        assert f"<code>{path}</code>" in answer.text
    assert set(re.findall(r"(?:src|href)=\"?(?=[^\"#])([^\"> ]*)", answer.text)) == {"/openapi.json"}
    assert "<script" not in answer.text
    assert "http://" not in answer.text
