"""Tokens that only the tokenizer knows are refused by every route that reads texts.

A lookup beyond the embedding table reads foreign memory, or ends the process.
"""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.api.http.routing import declared_routes
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.encoder_requests import post
from tests.fake_encoders import FakeEncoders, WordEncoder, make_encoder
from tests.fake_engine import FakeEngine

TASKS = ("classify", "token_classify", "embed", "token_embed", "mlm", "mlm_top", "sparse")
UNKNOWN = WordEncoder.vocab_size
TEXT = f"w7 w{UNKNOWN}"
MASKED = f"w4 {TEXT}"
IDS = [2, UNKNOWN, 3]
#: Bodies by path. Each would make the model read, or compare with, a token that it has no row for.
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/embeddings": [
        {"input": TEXT},
        {"input": [IDS]},
        {"input": [-1, 2]},
        {"messages": [{"role": "user", "content": TEXT}]},
    ],
    "/v1/moderations": [{"input": TEXT}],
    "/v1/rerank": [
        {"query": TEXT, "documents": ["w7"]},
        {"query": "w7", "documents": ["w7", TEXT]},
    ],
    "/v2/embed": [{"texts": [TEXT]}],
    "/v2/rerank": [{"query": "w7", "documents": [TEXT], "model": "encoder"}],
    "/v1/score": [{"text_1": TEXT, "text_2": "w7"}, {"text_1": "w7", "text_2": ["w7", TEXT]}],
    "/v1/classifications": [{"input": [TEXT]}],
    "/v1/classify": [{"input": TEXT}, {"input": [IDS]}],
    "/v1/pooling": [
        *({"input": TEXT, "task": task} for task in ("embed", "token_embed", "classify")),
        {"input": [IDS]},
    ],
    "/v1/rewards/score": [
        {"texts": [TEXT]},
        {"chats": [[{"role": "user", "content": TEXT}]]},
        {"prompt": "w7 ", "completions": [TEXT]},
    ],
    "/v1/mlm": [
        {"texts": MASKED},
        {"token_ids": [[4, UNKNOWN]]},
        {"texts": "w4 w7", "label_words": {"a": f"w{UNKNOWN}", "b": "w7"}},
        {"texts": "w4 w7", "targets": ["w7", f"w{UNKNOWN}"]},
        {"texts": "w4 w7", "targets": [UNKNOWN]},
        {"texts": TEXT, "pseudo_log_likelihood": True},
    ],
    "/embed": [{"inputs": TEXT}],
    "/embed_all": [{"inputs": TEXT}],
    "/embed_sparse": [{"inputs": TEXT}],
    "/predict": [{"inputs": TEXT}, {"inputs": [["w7", TEXT]]}],
    "/similarity": [{"inputs": {"source_sentence": "w7", "sentences": [TEXT]}}],
    "/decode": [{"ids": [UNKNOWN]}],
    "/": [{"inputs": TEXT}],
    "/models/{name:path}": [{"inputs": TEXT}],
    "/pipeline/{task}": [{"inputs": MASKED}],
    "/pipeline/{task}/{name:path}": [
        {"inputs": MASKED},
        {"inputs": "w4 w7", "parameters": {"targets": [f"w{UNKNOWN}"]}},
    ],
}
#: Routes that ask a model that generates.
OTHERS = {"/v1/generative_scoring"}
TASK_OF_PATH = {"/pipeline/{task}": "fill-mask", "/pipeline/{task}/{name:path}": "fill-mask"}
CALLS = [(path, body) for path, bodies in BODIES.items() for body in bodies]


def served() -> FakeEncoders:
    return FakeEncoders(
        make_encoder("encoder", chats=True, tasks=TASKS, labels=("reward",), is_reward=True),
        make_encoder("moderator", tasks=TASKS, labels=("neutral", "toxic")),
    )


def test_every_route_of_pooling_models_is_listed() -> None:
    app = make_app(FakeEngine(), ServerConfig())
    paths = {
        route.path
        for route in declared_routes(app)
        if route.endpoint.__module__.startswith("mlx_parallm.api.pooling.")
        and "POST" in (route.methods or ())
    }
    assert paths == BODIES.keys() | OTHERS


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_unknown_tokens_are_refused(path: str, body: dict[str, Any]) -> None:
    model = served()
    url = path.replace("{name:path}", "encoder").replace("{task}", TASK_OF_PATH.get(path, ""))
    answer = await post(model, url, body)
    assert answer.status_code in (400, 422), answer.text
    assert "vocabulary" in answer.text or str(UNKNOWN) in answer.text, answer.text
    assert not model.thread.requests


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_known_tokens_are_read(path: str, body: dict[str, Any]) -> None:
    model = served()
    url = path.replace("{name:path}", "encoder").replace("{task}", TASK_OF_PATH.get(path, ""))
    answer = await post(model, url, _known(body))
    # So nothing else was refused above.
    assert answer.status_code == 200, answer.text


def _known(value: Any) -> Any:
    """Return a body with known tokens in place of the unknown ones."""
    if isinstance(value, dict):
        return {key: _known(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_known(part) for part in value]
    if isinstance(value, str):
        return value.replace(f"w{UNKNOWN}", "w8")
    return 8 if value in (UNKNOWN, -1) else value


async def test_a_mask_token_that_the_model_lacks_is_refused() -> None:
    model = FakeEncoders(make_encoder("encoder", tasks=TASKS, vocab_size=4))
    answer = await post(model, "/v1/mlm", {"token_ids": [[2, 3]], "pseudo_log_likelihood": True})
    assert answer.status_code == 400
    assert not model.thread.requests
