"""Models that take pictures compute what transformers computes, alone and in any batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config import CacheConfig, ModelConfig, SchedulerConfig
from mlx_parallm.generation.inputs.prompt_inputs import PromptInputs
from mlx_parallm.models.vision.features import TwoWay
from mlx_parallm.models.vision.with_tower import TOWER
from mlx_parallm.types.model_input import TOKEN_IDS, InputKind
from mlx_parallm.types.request import ALL_TOKENS, GenerateRequest, SamplingParams
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.attention.two_way import TwoWaySpan
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.input_rows import InputFeatures
from mlx_parallm.worker.generation.memory import plan_kv
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.generation.rotary_rows import RotarySeam
from mlx_parallm.worker.weights.loader import LoadedModel, load_model
from scripts.golden_vision_cases import SHOWN_ROWS
from tests.compiled_attention import AheadAttention, CompiledAttention
from tests.golden_pictures import GoldenPictures, read_vision, vision_names, write_vision
from tests.integration.test_parity_generate import BLOCK_SIZE, Session
from tests.integration.test_prompt_embeds import InputRunner

MAX_LEN, NUM_BLOCKS = 256, 256


@cache
def golden_of(name: str) -> dict[str, Any]:
    return read_vision(name)


@cache
def loaded_of(name: str) -> LoadedModel:
    folder = write_vision(Path(mkdtemp()), golden_of(name))
    return load_model(ModelConfig(), folder)


@cache
def pictures_of(name: str) -> GoldenPictures:
    return GoldenPictures(golden_of(name), loaded_of(name).path)


@cache
def runner_of(name: str, backend: type[ReferenceAttention]) -> ModelRunner:
    loaded = loaded_of(name)
    layouts = probe_layout(loaded.model)
    attention = backend(BLOCK_SIZE)
    plan = plan_kv(
        layouts,
        loaded.config,
        CacheConfig(block_size=BLOCK_SIZE),
        SchedulerConfig(max_num_seqs=8),
        MAX_LEN,
        attention,
    )
    return ModelRunner(loaded, layouts, plan, NUM_BLOCKS, attention)


def longest_uncut(name: str) -> int:
    """Return the rows of the longest picture of a golden model that one step must hold."""
    count = len(golden_of(name)["prompts"])
    sources = [each for number in range(count) for each in pictures_of(name).inputs(number)]
    return max((len(each.span or ()) for each in sources if not each.may_cut), default=0)


class PictureSession(Session):
    """A session of a golden model."""

    def __init__(
        self,
        name: str,
        backend: type[ReferenceAttention] = ReferenceAttention,
        *,
        num_blocks: int = NUM_BLOCKS,
        budget: int = 24,
    ) -> None:
        budget = max(budget, longest_uncut(name))
        super().__init__(runner_of(name, backend), num_blocks=num_blocks, budget=budget)
        self.pictures = self.runner = InputRunner(runner_of(name, backend))
        self.name = name

    def add_prompt(
        self, request_id: str, number: int, max_tokens: int = 32, logprobs: int | None = None
    ) -> None:
        request = GenerateRequest(
            request_id=request_id,
            model="m",
            prompt_ids=tuple(golden_of(self.name)["prompts"][number]["ids"]),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=logprobs),
            inputs=pictures_of(self.name).inputs(number),
        )
        self.scheduler.add(request, seed=0, end_ids=frozenset())

    def check(self, request_id: str, number: int) -> None:
        tokens = self.result(request_id).tokens
        assert tokens == golden_of(self.name)["prompts"][number]["tokens"][: len(tokens)]


@pytest.mark.parametrize("name", vision_names())
def test_features_are_those_of_transformers(name: str) -> None:
    tower = getattr(loaded_of(name).model, TOWER)
    for number, prompt in enumerate(golden_of(name)["prompts"]):
        rows = []
        for source in pictures_of(name).inputs(number):
            arrays = {
                key: mx.array(np.frombuffer(each.data, each.dtype).reshape(each.shape))
                for key, each in source.arrays.items()
                if key != TOKEN_IDS
            }
            rows.append(np.array(tower(arrays).rows))
        if rows:
            shown = np.concatenate(rows)[list(SHOWN_ROWS)]
            scale = np.abs(prompt["features"]).max()
            np.testing.assert_allclose(shown, prompt["features"], atol=1e-4 * scale)


@pytest.mark.parametrize("name", vision_names())
@pytest.mark.parametrize("backend", [ReferenceAttention, AheadAttention, CompiledAttention])
def test_greedy_tokens_are_those_of_transformers(
    name: str, backend: type[ReferenceAttention]
) -> None:
    session = PictureSession(name, backend)
    assert InputKind.PICTURE in session.runner.info.input_kinds
    check_all(session)


@pytest.mark.parametrize("name", vision_names())
def test_logits_are_those_of_transformers(name: str) -> None:
    session = PictureSession(name)
    prompts = golden_of(name)["prompts"]
    for number in range(len(prompts)):
        session.add_prompt(f"{number}", number, 1, ALL_TOKENS)
    session.finish()
    for number, prompt in enumerate(prompts):
        logprob = session.tokens[f"{number}", 0][0].logprob
        assert logprob is not None
        top = dict(logprob.top)
        logits = np.array(prompt["logits"])
        shifted = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        own = [top[token_id] for token_id in range(len(logits))]
        np.testing.assert_allclose(own, shifted, atol=1e-4 * np.abs(logits).max())


def check_all(session: PictureSession) -> None:
    """Run ragged prompts in chunks through pictures, which join while others decode."""
    count = len(golden_of(session.name)["prompts"])
    for number in range(count):
        session.add_prompt(f"first {number}", number)
        session.step()
    for number in range(count):
        session.add_prompt(f"second {number}", number)
    session.finish()
    for number in range(count):
        session.check(f"first {number}", number)
        session.check(f"second {number}", number)


def test_a_picture_is_computed_once_and_its_blocks_are_reused() -> None:
    session = PictureSession("llava")
    for request_id in ("first", "second"):
        session.add_prompt(request_id, 0)
        session.finish()
        session.check(request_id, 0)
    assert session.pictures.num_computed == 1
    length = len(golden_of("llava")["prompts"][0]["ids"])
    assert session.cached["second"] == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("name", vision_names())
def test_preempted_prompts_compute_their_pictures_again(name: str) -> None:
    prompts = golden_of(name)["prompts"]
    # Room for the longest prompt with its completion, and for little more.
    longest = max(len(prompt["ids"]) + len(prompt["tokens"]) for prompt in prompts)
    num_blocks = max(24, longest // BLOCK_SIZE + 2)
    session = PictureSession(name, AheadAttention, num_blocks=num_blocks, budget=64)
    count = len(prompts)
    for number in range(count):
        session.add_prompt(f"{number}", number)
    session.finish()
    assert session.scheduler.stats().num_preemptions > 0
    for number in range(count):
        session.check(f"{number}", number)


def no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(self: InputFeatures, sequences: Sequence[ScheduledSequence]) -> mx.array | None:
        rows = gather(self, sequences)
        return None if rows is None else mx.zeros_like(rows)

    gather = InputFeatures.gather
    monkeypatch.setattr(InputFeatures, "gather", zeros)


def other_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_rows(
        self: InputFeatures, slot: int, rows: mx.array, *more: Any, **options: Any
    ) -> None:
        put(self, slot, rows[::-1], *more, **options)

    put = InputFeatures.put
    monkeypatch.setattr(InputFeatures, "put", reversed_rows)


def plain_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotarySeam, "positions", lambda *_: None)


def plain_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptInputs, "rope_offsets", lambda *_: ())


def causal_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InputFeatures, "two_way_spans", lambda *_: [])


def other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanged(self: InputFeatures, sequences: Sequence[ScheduledSequence]) -> list[TwoWaySpan]:
        return [replace(span, two_way=others[span.two_way]) for span in spans(self, sequences)]

    spans = InputFeatures.two_way_spans
    others = dict(zip(TwoWay, reversed(TwoWay), strict=True))
    monkeypatch.setattr(InputFeatures, "two_way_spans", exchanged)


def cut_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptInputs, "cut", lambda self, start, stop: stop)


def no_deepstack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InputFeatures, "gather_layers", lambda *_: None)


@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        (name, mutation)
        for name in ("gemma3", "gemma4", "gemma4_moe")
        for mutation in (causal_spans, cut_spans, other_layers)
    ]
    + [(name, mutation) for name in vision_names() for mutation in (no_features, other_pictures)]
    + [
        (name, mutation)
        for name in vision_names()
        if name.startswith("qwen")
        for mutation in (plain_positions, plain_offsets)
    ]
    + [(name, no_deepstack) for name in vision_names() if name.startswith("qwen3_vl")],
)
def test_the_tokens_show_what_is_left_out(
    name: str, mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        check_all(PictureSession(name))
