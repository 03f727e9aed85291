"""Random requests from the server's own schema: no 5xx, whatever they hold."""

from __future__ import annotations

from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok

from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

MODEL = "mlx-parallm-demo"
MAX_TOKENS = 4


def bound_samples(params: Any) -> None:
    """Limit the lengths in the nested fields of vLLM, SGLang and Ollama too."""
    for options in params if isinstance(params, list) else [params]:
        if isinstance(options, dict):
            names = ("max_tokens", "max_new_tokens", "num_predict")
            options |= dict.fromkeys(names, MAX_TOKENS)


def call_at_random(operation: Any) -> None:
    """Send a bounded number of random requests to one route."""

    @given(data=st.data())
    @settings(
        max_examples=8,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)),
    )
    def run(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy())
        if isinstance(case.body, dict):
            case.body["max_tokens"] = case.body["max_output_tokens"] = MAX_TOKENS
            case.body.pop("max_completion_tokens", None)
            bound_samples(case.body.get("sampling_params"))
            bound_samples(case.body.setdefault("options", {}))
            case.body["stream"] = False
            if data.draw(st.booleans()):
                case.body["model"] = MODEL
        response = case.call(timeout=None)
        # No loaded model can serve this route.
        assert response.status_code < 500 or operation.path == "/v1/moderations", response.text
        assert response.status_code != 422

    run()


def test_no_request_of_the_schema_is_a_server_error(live_server: ServerProcess) -> None:
    schema = schemathesis.openapi.from_url(f"{live_server.url}/openapi.json", timeout=None)
    # Random pauses would make the other requests wait for ever.
    schema = schema.exclude(tag="control")
    for result in schema.get_all_operations():
        operation = result.ok() if isinstance(result, Ok) else None
        assert operation is not None, result
        call_at_random(operation)
    assert live_server.metric("vllm:num_requests_running") == 0
