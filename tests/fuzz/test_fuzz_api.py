"""The API, tried by a generator that knows only our own OpenAPI document."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from kvloop.gateway.openapi import document
from tests.fuzz.conftest import Served
from tests.router.stack import stack

CHECKS = [
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]


schema = schemathesis.openapi.from_dict(document())


@schema.parametrize()
@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_the_router_does_what_its_document_says(case: schemathesis.Case, served: Served) -> None:
    if isinstance(case.body, dict):
        # Doubles give as many answers as they are asked for; vLLM has a limit.
        case.body |= {
            key: min(case.body[key], 3) for key in ("n",) if type(case.body.get(key)) is int
        }
    response = case.call(base_url=served.stack.url, timeout=30)
    case.validate_response(response, checks=CHECKS)
    assert response.headers["x-request-id"]
    # Doubles trip over bodies that vLLM refuses; that is then their 500, and passes on.
    assert "The router failed" not in response.text


def test_after_all_that_the_router_is_well(served: Served) -> None:
    served.assert_well()


async def test_the_document_is_served_as_it_is() -> None:
    async with stack() as s, s.http.get(f"{s.url}/openapi.json") as response:
        assert await response.json() == document()


async def test_the_document_lists_every_path_of_the_clients_listener() -> None:
    async with stack() as s:
        app = s.router.application()
        served = {
            (route.resource.canonical, route.method.lower())
            for route in app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
    listed = {(path, method) for path, item in document()["paths"].items() for method in item}
    assert listed == served
