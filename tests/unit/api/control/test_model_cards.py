"""The tasks and state of models in /v1/models, by which clients choose one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import httpx2
import pytest

from mlx_parallm.api.control.server.models import anthropic_page, model_card
from mlx_parallm.engine.status import ModelState, ModelStatus
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.pooling import PoolingInfo
from tests.api_app import make_app
from tests.fake_engine import FakeEngine
from tests.sum_kind import SumModel

INFO = PoolingInfo(
    architecture="x",
    vocab_size=256,
    max_model_len=9,
    dims=2,
    dtype="float32",
    weight_bytes=1,
    tasks=("classify", "embed"),
)
TOKENIZER: Any = None
IMAGES: Any = object()
MODEL = PoolingModel(
    names=("one",),
    root="r",
    created=1,
    tokenizer=TOKENIZER,
    info=INFO,
    max_batch_tokens=64,
    max_waiting=100,
)


def card_of(state: ModelState, model: PoolingModel | None) -> dict[str, Any]:
    status = ModelStatus(
        names=("one",), root="r", state=state, progress=1.0, is_pinned=False, model=model
    )
    return model_card("one", status, {})


async def test_a_model_that_generates_says_so() -> None:
    transport = httpx2.ASGITransport(make_app(FakeEngine(), ServerConfig()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
        cards = (await client.get("/v1/models")).json()["data"]
        single = (await client.get("/v1/models/alias")).json()
    assert [card["tasks"] for card in cards] == [["generate"]] * len(cards)
    assert single["tasks"] == ["generate"]
    assert single["input_modalities"] == ["text"]


def test_a_model_with_a_tower_takes_images() -> None:
    model = replace(FakeEngine().models()[0], images=IMAGES)
    assert model.input_modalities == ("text", "image")


def test_an_encoder_says_what_it_does_once_that_is_known() -> None:
    assert card_of(ModelState.LOADED, MODEL)["tasks"] == ["classify", "embed"]
    assert card_of(ModelState.LOADED, MODEL)["input_modalities"] == ["text"]
    unknown = card_of(ModelState.LOADING, None)
    assert unknown["tasks"] is None
    assert unknown["input_modalities"] is None


def test_a_model_that_reads_no_text_says_so() -> None:
    sums = SumModel(names=("one",), root="r", num_bytes=1)
    assert card_of(ModelState.LOADED, cast("PoolingModel", sums))["input_modalities"] == []


async def ask(path: str, *, is_anthropic: bool = True, **params: Any) -> httpx2.Response:
    transport = httpx2.ASGITransport(make_app(FakeEngine(), ServerConfig()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
        headers = {"anthropic-version": "2023-06-01"} if is_anthropic else {}
        return await client.get(path, params=params, headers=headers)


async def test_anthropics_client_gets_its_own_form() -> None:
    page = (await ask("/v1/models")).json()
    (first, *_), ids = page["data"], [model["id"] for model in page["data"]]
    assert first["type"] == "model"
    assert first["display_name"] == first["id"]
    assert first["created_at"].endswith("Z")
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, ids[0], ids[-1])
    assert (await ask(f"/v1/models/{ids[0]}")).json() == first


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "", "٣", "00001", "1.5"])
async def test_a_limit_counts_for_anthropics_client_only(limit: str) -> None:
    refused = await ask("/v1/models", limit=limit)
    assert refused.status_code == 400
    assert "limit must be 1 to 1000" in refused.text
    answer = await ask("/v1/models", is_anthropic=False, limit=limit)
    assert answer.json() == (await ask("/v1/models", is_anthropic=False)).json()


CARDS = [{"id": name, "created": 0, "max_model_len": 9} for name in "abcd"]


@pytest.mark.parametrize(
    ("limit", "after", "before", "ids", "has_more"),
    [
        (2, None, None, "ab", True),
        (4, None, None, "abcd", False),
        (2, "b", None, "cd", False),
        (1, "b", None, "c", True),
        (2, None, "d", "bc", True),
        (5, "a", "d", "bc", False),
        (2, "d", None, "", False),
        (2, "x", None, "", False),
        (2, None, "x", "", False),
    ],
)
def test_pages_of_models(
    limit: int, after: str | None, before: str | None, ids: str, has_more: bool
) -> None:
    page = anthropic_page(CARDS, limit=limit, after=after, before=before)
    assert "".join(model["id"] for model in page["data"]) == ids
    assert page["has_more"] == has_more
