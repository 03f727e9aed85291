"""A model over two ranks answers every kind of request as one process does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any, TypeAlias

import httpx2
import numpy as np
import pytest
from openai import AsyncOpenAI

from mlx_parallm.client.rl import RLClient
from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_NAME
from tests.server_process import ServerProcess

PLAIN, QUANTISED = DEMO_NAME, str(DEMO_FOLDER)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
#: A model's pool holds a few of the prompts, so that sequences are preempted; prompts are cut into
#: chunks that run beside decode rows.
FLAGS = (
    *("--model", PLAIN, "--model", QUANTISED, "--kv-cache-dtype", f"{QUANTISED}=int8"),
    *("--kv-cache-memory-bytes", "4MiB", "--max-num-batched-tokens", "48"),
    *("--max-num-seqs", "16", "--block-size", "16"),
    *("--speculative-config", json.dumps(NGRAM)),
)
#: QUERIES: weights of which each rank has the half of the rows; the folder has them in 8 bits.
QUERIES = "model.layers.0.self_attn.q_proj.weight"
Request: TypeAlias = dict[str, Any]
COUNTED = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, "
REQUESTS: list[Request] = [
    {"prompt": "The capital of France is", "temperature": 0},
    {"prompt": "What is 17 + 25?", "seed": 3, "temperature": 0.9, "top_p": 0.8},
    {"prompt": "Sort these numbers: 9 4 7 1", "seed": 4, "n": 4, "temperature": 1.0},
    {"prompt": "Hello", "seed": 5, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"prompt": "Hello there", "seed": 6, "extra_body": {"repetition_penalty": 1.3, "top_k": 20}},
    {"prompt": "a b c", "seed": 7, "logit_bias": {"70": 5, "71": -100}},
    {"prompt": COUNTED, "temperature": 0},
    {"prompt": COUNTED * 4, "seed": 8},
    {"prompt": COUNTED * 4 + "and then", "seed": 9, "extra_body": {"prompt_logprobs": 2}},
    {
        "prompt": "A number:",
        "seed": 10,
        "extra_body": {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2,9}"}},
    },
    *({"prompt": f"{COUNTED * 3}{number}", "seed": number} for number in range(20, 25)),
]


DRAFTED: Request = {
    "prompt": "Repeat this text: the quick brown fox jumps over the lazy dog",
    "temperature": 0,
    "extra_body": {"ignore_eos": True, "speculative": True},
}
MAX_TOKENS = 24
#: How far log-probabilities may be apart. A sum of other rounding moves a key or a value by a whole
#: step of int8, rarely. One process differs as much from itself where other requests cut its
#: prompts into other chunks.
LIMITS = {PLAIN: 1e-4, QUANTISED: 0.2}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerProcess]]:
    """Yield a server of one process and one of two ranks, with equal flags."""
    with ExitStack() as opened:
        servers = [ServerProcess(*FLAGS, num_ranks=size) for size in (1, 2)]
        for server in servers:
            opened.callback(server.stop)
        for server in servers:
            server.wait_until_ready()
        yield servers


async def answers_of(server: ServerProcess, model: str, requests: list[Request]) -> list[Any]:
    """Return the answers to requests that begin together, however slowly they arrive."""
    async with (
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        RLClient(server.url) as control,
    ):
        await control.pause()
        answers = asyncio.gather(
            *(client.completions.create(model=model, **with_defaults(each)) for each in requests)
        )
        # Pausing anew says how many requests have come; one that is refused ends the wait.
        while not answers.done() and await control.pause() < len(requests):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await control.resume()
        return await answers


def with_defaults(request: Request) -> Request:
    """Return a request with log-probabilities and without drafts, unless it has others."""
    extra = {"speculative": False, **request.get("extra_body", {})}
    return {"max_tokens": MAX_TOKENS, "logprobs": 2, **request, "extra_body": extra}


def check(servers: list[ServerProcess], model: str, requests: list[Request]) -> None:
    """Fail unless both servers give the same answers."""
    alone, ranks = (asyncio.run(answers_of(server, model, requests)) for server in servers)
    for request, expected, answer in zip(requests, alone, ranks, strict=True):
        assert answer.usage.completion_tokens == expected.usage.completion_tokens, request
        for theirs, ours in zip(expected.choices, answer.choices, strict=True):
            assert ours.text == theirs.text, request
            assert ours.finish_reason == theirs.finish_reason
            assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=LIMITS[model]), request


def test_answers_are_those_of_one_process(servers: list[ServerProcess]) -> None:
    check(servers, PLAIN, REQUESTS)
    # The order in which requests arrive decides whether sequences are preempted.
    for number in count():
        if all(server.metric("vllm:num_preemptions_total") for server in servers):
            break
        check(servers, PLAIN, [salted(request, str(number)) for request in REQUESTS])


def salted(request: Request, salt: str) -> Request:
    """Return a request that shares no prefix with those of another salt."""
    return {**request, "extra_body": {**request.get("extra_body", {}), "cache_salt": salt}}


@pytest.mark.slow
def test_answers_with_quantised_kv_are_those_of_one_process(servers: list[ServerProcess]) -> None:
    check(servers, QUANTISED, REQUESTS[::2])


def test_prefixes_are_found_again(servers: list[ServerProcess]) -> None:
    _, ranks = servers
    hits = ranks.metric("vllm:prefix_cache_hits_total")
    check([ranks, ranks], PLAIN, REQUESTS[6:10])
    assert ranks.metric("vllm:prefix_cache_hits_total") > hits


def test_answers_with_drafts_are_those_of_one_process(servers: list[ServerProcess]) -> None:
    check(servers, PLAIN, [DRAFTED, *({**DRAFTED, "seed": seed} for seed in range(3))])
    for server in servers:
        assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


async def updated_digests(server: ServerProcess) -> list[dict[str, str]]:
    """Return the digests of all weights before an update by body, after it, and after sleep."""
    new = np.random.default_rng(3).standard_normal((256, 256)).astype(np.float32)
    digests: list[dict[str, str]] = []
    async with httpx2.AsyncClient(base_url=server.url) as http, RLClient(server.url) as client:

        async def read() -> None:
            response = await http.post("/weights_checker", json={})
            digests.append(response.json()["checksums"])

        await read()
        await client.update_weights({QUERIES: new * 0.05}, version="new")
        await read()
        # The folder's weights come back.
        await client.sleep(2)
        await client.wake_up()
        await read()
    return digests


def test_digests_of_updates_are_those_of_one_process(servers: list[ServerProcess]) -> None:
    alone, ranks = (asyncio.run(updated_digests(server)) for server in servers)
    before, after, awake = alone
    assert [name for name in before if before[name] != after[name]] == [QUERIES]
    assert awake == before
    assert ranks == alone
    check(servers, PLAIN, REQUESTS[:3])


def logprobs(choice: Any) -> list[float]:
    """Return the log-probabilities of a choice's tokens, after those of the prompt, if asked."""
    entries = getattr(choice, "prompt_logprobs", None) or []
    prompt = [token["logprob"] for entry in entries if entry for token in entry.values()]
    return prompt + choice.logprobs.token_logprobs
