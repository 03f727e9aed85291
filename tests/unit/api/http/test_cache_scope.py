"""Only requests with the same key reuse cached results."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from mlx_parallm.api.files.service import LineSender
from mlx_parallm.api.http.auth import client_of
from mlx_parallm.generation.scheduler.sequence import RequestGroup
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.events import FinishReason, GenerateEvent, TokenEvent
from mlx_parallm.types.pooling import PoolingInput, PoolingResults, PoolRequest
from mlx_parallm.types.request import BaseWeights, GenerateRequest, PolicyWeights, WeightsVersion
from mlx_parallm.types.step import TokenLogprob
from mlx_parallm.types.work import EVERYBODY, CacheScope
from tests.api_app import make_app
from tests.fake_encoders import FakeEncoders, make_encoder
from tests.fake_engine import FakeEngine, prompt_event
from tests.sum_encoder import SumEncoder, engine_of

TWO_KEYS = ServerConfig(api_keys=("one", "two"), admin_api_keys=("admin",))
SHARED = replace(TWO_KEYS, cache_scope="server")
USER = [{"role": "user", "content": "Hi"}]
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "alias", "prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"model": "alias", "messages": USER, "max_tokens": 1},
    "/v1/responses": {"model": "alias", "input": "a"},
    "/v1/responses#background": {"model": "alias", "input": "a", "background": True},
    "/v1/messages": {"model": "alias", "messages": USER, "max_tokens": 1},
    "/v1/decisions": {
        "model": "alias",
        "input": "a",
        "questions": [{"type": "predicate", "instructions": "It is late."}],
    },
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/generate#vllm": {"prompt": {"prompt_token_ids": [1]}, "max_tokens": 1},
    "/inference/v1/generate": {
        "model": "alias", "token_ids": [1], "sampling_params": {"max_tokens": 1},
    },
    "/v1/rl/rollout": {"model": "alias", "prompts": ["a"], "max_tokens": 1},
    "/v1/rl/logprobs": {
        "model": "alias", "items": [{"prompt_token_ids": [1], "completion_token_ids": [2]}],
    },
    "/v1/score": {"model": "alias", "query": "a", "items": ["b"], "label_token_ids": [1, 2]},
    "/generative_scoring": {
        "model": "alias", "query": "a", "items": ["b"], "label_token_ids": [1, 2],
    },
}  # fmt: skip
READER = make_encoder(
    tasks=("embed", "token_embed", "classify", "token_classify", "mlm", "sparse"),
    labels=("LABEL_0", "LABEL_1"),
)
SCORER = make_encoder("scorer", tasks=("classify",), labels=("LABEL_0",))
READING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "encoder", "input": "w5"},
    "/v1/pooling": {"model": "encoder", "input": "w5"},
    "/v1/classify": {"model": "encoder", "input": "w5"},
    "/v1/score": {"model": "scorer", "text_1": "w5", "text_2": "w6"},
    "/v1/rerank": {"model": "scorer", "query": "w5", "documents": ["w6"]},
    "/v1/rewards/score": {"model": "scorer", "texts": ["w5"]},
    "/v1/mlm": {"model": "encoder", "texts": "w5 w4"},
    "/embed": {"inputs": "w5"},
    "/embed_all": {"inputs": "w5"},
    "/embed_sparse": {"inputs": "w5"},
    "/predict": {"inputs": "w5"},
    "/rerank": {"query": "w5", "texts": ["w6"]},
    "/similarity": {"inputs": {"source_sentence": "w5", "sentences": ["w6"]}},
    "/": {"inputs": "w5 w4", "task": "fill-mask"},
}
PARTS = st.one_of(st.none(), st.text(max_size=4), st.sampled_from(["None", "', '", "\0", "a\0b"]))
SCOPES = st.builds(CacheScope, PARTS)


def scope_of_key(key: str) -> CacheScope:
    return CacheScope(client_of(Headers({"x-api-key": key}), TWO_KEYS))


async def post(
    engine: FakeEngine, config: ServerConfig, path: str, body: dict[str, Any], key: str | None
) -> httpx2.Response:
    transport = httpx2.ASGITransport(make_app(engine, config))
    headers = {} if key is None else {"x-api-key": key}
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return await http.post(path.partition("#")[0], json=body, headers=headers)


async def submitted(
    config: ServerConfig, path: str, body: dict[str, Any], key: str | None
) -> list[GenerateRequest]:
    engine = FakeEngine()
    engine.script = chosen
    response = await post(engine, config, path, body, key)
    scopes = []
    while not engine.submitted.empty():
        scopes.append(engine.submitted.get())
    assert scopes, response.text
    return scopes


async def chosen(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
    """Yield a token, and the log-probabilities that the request asks for."""
    yield prompt_event(request)
    top = tuple((token, -1.0) for token in request.params.logprob_token_ids)
    yield TokenEvent(
        request_id=request.request_id,
        index=0,
        token_ids=(1,),
        text="",
        logprobs=(TokenLogprob(1, -1.0, top),) if request.params.logprobs is not None else (),
        finish_reason=FinishReason.LENGTH,
    )


@pytest.mark.parametrize("path", GENERATING)
async def test_a_generating_route_computes_in_the_scope_of_its_key(path: str) -> None:
    for key in ("one", "two", "admin"):
        for request in await submitted(TWO_KEYS, path, GENERATING[path], key):
            assert request.scope == scope_of_key(key)


@pytest.mark.parametrize("path", READING)
async def test_an_encoder_route_computes_in_the_scope_of_its_key(path: str) -> None:
    for key in ("one", "two"):
        engine = FakeEngine()
        engine.pooling = encoders = FakeEncoders(READER, SCORER)
        response = await post(engine, TWO_KEYS, path, READING[path], key)
        assert encoders.thread.requests, response.text
        assert {request.scope for request in encoders.thread.requests} == {scope_of_key(key)}


async def test_a_rollout_is_rewarded_in_the_scope_of_its_key() -> None:
    engine = FakeEngine()
    engine.pooling = encoders = FakeEncoders(SCORER)
    path = "/v1/rl/rollout"
    body = GENERATING[path] | {"max_tokens": 6, "reward_model": {"model": "scorer"}}
    response = await post(engine, TWO_KEYS, path, body, "two")
    assert response.json()["groups"][0]["samples"][0]["reward"] is not None, response.text
    assert [request.scope for request in encoders.thread.requests] == [scope_of_key("two")]


@pytest.mark.parametrize("config", [TWO_KEYS, SHARED], ids=["key", "server"])
async def test_a_line_of_a_batch_has_the_scope_of_its_owner(config: ServerConfig) -> None:
    path = "/v1/completions"
    (own,) = await submitted(config, path, GENERATING[path], "one")
    engine = FakeEngine()
    send = LineSender(make_app(engine, config), None)
    owner = client_of(Headers({"x-api-key": "one"}), config)
    answer = await send(owner, path, GENERATING[path], "id")
    assert answer.status_code == 200
    assert engine.submitted.get_nowait().scope == own.scope
    engine.pooling = encoders = FakeEncoders(READER, SCORER)
    answer = await send(owner, "/v1/embeddings", READING["/v1/embeddings"], "id")
    assert answer.status_code == 200
    assert [request.scope for request in encoders.thread.requests] == [own.scope]


@pytest.mark.parametrize(
    ("config", "separates"),
    [
        (ServerConfig(), False),
        (ServerConfig(api_keys=("one",)), False),
        (ServerConfig(api_keys=("one", "one"), admin_api_keys=("one",)), False),
        (ServerConfig(api_keys=("one", "two")), True),
        (ServerConfig(api_keys=("one",), admin_api_keys=("admin",)), True),
        (ServerConfig(admin_api_keys=("admin", "other")), False),
        (SHARED, False),
        (ServerConfig(api_keys=("one",), cache_scope="key"), True),
    ],
)
async def test_keys_are_separated_where_there_are_several(
    config: ServerConfig, separates: bool
) -> None:
    key = config.api_keys[0] if config.api_keys else None
    (request,) = await submitted(config, "/v1/completions", GENERATING["/v1/completions"], key)
    assert (request.scope != EVERYBODY) is separates


@given(first=st.tuples(SCOPES, PARTS, PARTS, PARTS), other=st.tuples(SCOPES, PARTS, PARTS, PARTS))
def test_contents_are_equal_exactly_when_all_their_parts_are(
    first: tuple[Any, ...], other: tuple[Any, ...]
) -> None:
    assert (first[0].content_key(*first[1:]) == other[0].content_key(*other[1:])) is (
        first == other
    )


def test_no_salt_imitates_another_scope_adapter_or_key() -> None:
    request = GenerateRequest(request_id="r", model="m", prompt_ids=(1,))
    adapted = PolicyWeights(BaseWeights(), WeightsVersion("adapter", "1"))
    plain = PolicyWeights(BaseWeights())
    groups = [
        RequestGroup(piece, frozenset(), 0, weights)
        for weights in (plain, adapted)
        for piece in (
            request,
            replace(request, cache_salt="s"),
            replace(request, extra_key="s"),
            replace(request, extra_key="k", cache_salt="s"),
            replace(request, cache_salt="1:ks"),
            replace(request, scope=CacheScope("a")),
            replace(request, scope=CacheScope("b")),
            replace(request, scope=CacheScope("a"), cache_salt="b"),
            replace(request, scope=CacheScope("a"), cache_salt="b\0"),
            replace(request, cache_salt="', 'b"),
        )
    ]
    assert len({group.salt for group in groups}) == len(groups)


def test_an_encoder_keeps_and_joins_results_by_scope() -> None:
    encoder = SumEncoder()
    engine = engine_of(encoder, cache_bytes=1 << 20)
    answers: dict[str, PoolingResults] = {}

    def ask(name: str, scope: CacheScope) -> None:
        inputs = (PoolingInput((1, 2)),)
        request = PoolRequest(request_id=name, model="m", inputs=inputs, scope=scope)
        engine.add(request, lambda results: answers.__setitem__(name, results))

    def run() -> None:
        while engine.has_work():
            engine.step()

    ask("a", CacheScope("a"))
    ask("b", CacheScope("b"))
    run()
    # Two inputs: nobody learns by waiting less that another client asked for the same.
    assert encoder.batches == [[(1, 2), (1, 2)]]
    for name, scope in (("a again", CacheScope("a")), ("all", EVERYBODY), ("c", CacheScope("c"))):
        ask(name, scope)
        run()
    hits = {name: results.cache_hits for name, results in answers.items()}
    assert hits == {
        "a": (False,), "b": (False,), "a again": (True,), "all": (False,), "c": (False,),
    }  # fmt: skip


def test_the_scope_goes_to_another_process() -> None:
    scope = CacheScope("a")
    request = GenerateRequest(request_id="r", model="m", prompt_ids=(1,), scope=scope)
    read = PoolRequest(request_id="r", model="m", inputs=(PoolingInput((1,)),), scope=scope)
    for piece in (request, read):
        assert pickle.loads(pickle.dumps(piece)).scope == scope


async def test_an_extra_key_and_a_salt_of_sglang_stay_apart() -> None:
    body = GENERATING["/generate"] | {"extra_key": "k", "cache_salt": "s"}
    (request,) = await submitted(TWO_KEYS, "/generate", body, "one")
    assert (request.extra_key, request.cache_salt) == ("k", "s")
