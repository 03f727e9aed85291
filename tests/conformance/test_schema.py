"""random requests of the server's own schema: no 5xx, and every answer is as the schema says"""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

EXAMPLES = 200
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
# Answers of any length would be the model's time.
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MAX_TOKENS = 16
# NESTED: lengths are in sampling_params. UNBOUNDED: samples may take the rest of the context, and
# ids drawn at random are nothing that the model would end; with ignore_eos, no answer ends earlier.
NESTED = ("/inference/v1/generate",)
UNBOUNDED = (*NESTED, "/v1/rl/rollout")
RESPONSES = "/v1/responses"
SCHEMA = schemathesis.openapi.from_url(f"{os.environ['CONFORMANCE_URL']}/openapi.json")
# Others would wait for ever on a server that was paused at random.
SCHEMA = SCHEMA.exclude(tag="control")
OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]


def shorten(body: dict[str, Any], path: str) -> None:
    """Let the model write little."""
    holder = body.get("sampling_params") if path in NESTED else body
    if not isinstance(holder, dict):
        return
    if path in UNBOUNDED or holder.get("ignore_eos"):
        holder["max_output_tokens" if path == RESPONSES else "max_tokens"] = MAX_TOKENS
    for name in LENGTHS:
        if holder.get(name) is not None:
            holder[name] = MAX_TOKENS


@pytest.mark.timeout(900)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_operation(server: Any, operation: Any) -> None:
    headers = {"Authorization": f"Bearer {server.api_key}"}

    @given(data=st.data())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy())
        if isinstance(case.body, dict):
            shorten(case.body, operation.path)
            if "model" in case.body and data.draw(st.booleans()):
                case.body["model"] = server.model
        response = case.call(headers=headers, timeout=60)
        # Nothing loaded can serve this one route, and the schema says so.
        if operation.path == "/v1/moderations" and response.status_code == 501:
            return
        case.validate_response(response, checks=CHECKS, headers=headers)

    run()
