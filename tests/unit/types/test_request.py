"""Requests keep their fields on their way to an engine."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from mlx_parallm.types.model_input import InputKind, ModelInput
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.work import CacheScope

# FILLED has another value than the default one in every field.
FILLED = GenerateRequest(
    request_id="id",
    model="model",
    prompt_ids=(1, 2, 3),
    params=SamplingParams(n=3, seed=7),
    priority=2,
    rank=1,
    client="client",
    cache_salt="salt",
    extra_key="key",
    scope=CacheScope("owner"),
    adapter="adapter",
    group="group",
    inputs=(ModelInput(kind=InputKind.PROMPT_EMBEDS, content="rows", arrays={}, nbytes=4),),
    turn_start=2,
    answer_start=3,
    is_local=True,
)
# WAYS: what happens to a request on its way, and the fields that it changes.
WAYS: dict[str, tuple[Callable[[GenerateRequest], GenerateRequest], set[str]]] = {
    "pickled": (lambda request: pickle.loads(pickle.dumps(request)), set()),
    "entering": (
        lambda request: request.entering(CacheScope("other"), 0, is_background=True),
        {"scope", "priority"},
    ),
    "with a seed": (
        lambda request: replace(request, params=SamplingParams(n=3)).with_seed(lambda: 8),
        {"params"},
    ),
    "a part": (lambda request: request.part("part", [1, 2]), {"request_id", "params"}),
}


def test_every_field_is_filled() -> None:
    empty = GenerateRequest(request_id="", model="", prompt_ids=())
    defaults = {each.name for each in fields(empty) if _same(each.name, FILLED, empty)}
    assert defaults == set()


@pytest.mark.parametrize("way", WAYS)
def test_a_request_keeps_its_fields(way: str) -> None:
    go, changes = WAYS[way]
    gone = go(FILLED)
    assert {each.name for each in fields(FILLED) if not _same(each.name, FILLED, gone)} == changes


def _same(name: str, request: GenerateRequest, other: GenerateRequest) -> bool:
    return getattr(request, name) == getattr(other, name)
