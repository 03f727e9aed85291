"""atropos' servers for SGLang and vLLM: samples with ids and log-probabilities by ``/generate``."""

from __future__ import annotations

import asyncio
import math

import pytest
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from exercises import prompt_ids


def config(server):
    return APIServerConfig(
        model_name=server.model,
        base_url=f"{server.url}/v1",
        api_key="x",
        tokenizer_name=str(server.folder),
        num_requests_for_eval=1,
    )


@pytest.mark.parametrize("kind", [SGLangServer, VLLMServer])
def test_tokens_and_logprobs(server, kind):
    ids = prompt_ids(server)

    async def run():
        client = kind(config(server))
        return await client._tokens_and_logprobs_completion_wrapper(
            model=server.model, input_ids=list(ids), n=2, max_tokens=6, temperature=1.0
        )

    prompt, outputs, logprobs, reasons = asyncio.run(run())
    assert prompt == ids
    assert len(outputs) == len(logprobs) == len(reasons) == 2
    for made, values in zip(outputs, logprobs, strict=True):
        assert len(made) == len(values) > 0
        assert all(math.isfinite(value) and value <= 0 for value in values)


def test_prompt_logprobs(server):
    ids = prompt_ids(server)

    async def run():
        client = VLLMServer(config(server))
        return await client._get_logprobs_wrapper(
            model=server.model, input_ids=list(ids), top_k=2, temperature=1.0
        )

    answer = asyncio.run(run())
    assert len(answer["prompt_tokens"]) == len(ids)
    assert len(answer["prompt_topk_logprobs"]) == len(ids)


def test_server_is_healthy(server):
    async def run():
        client = SGLangServer(config(server))
        task = asyncio.create_task(client.check_server_status_task())
        for _ in range(100):
            await asyncio.sleep(0.1)
            if client.server_healthy:
                break
        task.cancel()
        return client.server_healthy

    assert asyncio.run(run())
