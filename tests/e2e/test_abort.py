"""A request that is ended from outside, as its client sees it."""

from __future__ import annotations

import httpx2
import openai
import pytest

from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
LONG = {"max_tokens": 1500, "extra_body": {"ignore_eos": True, "request_id": "to-abort"}}


@pytest.mark.parametrize("n", [1, 3])
def test_an_aborted_stream_ends_cleanly(live_server: ServerProcess, n: int) -> None:
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="x") as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], n=n, stream=True, **LONG
        )
        reasons: dict[int, str | None] = {}
        has_aborted = False
        for chunk in stream:
            if not has_aborted and chunk.choices[0].delta.content:
                body = {"request_ids": ["to-abort"]}
                answer = httpx2.post(f"{live_server.url}/abort_requests", json=body)
                assert answer.json() == {"aborted": ["chatcmpl-to-abort"]}
                has_aborted = True
            for choice in chunk.choices:
                reasons[choice.index] = choice.finish_reason
    assert set(reasons) == set(range(n))
    assert set(reasons.values()) == {"abort"}
    assert httpx2.get(f"{live_server.url}/load").json()["server_load"] == 0
