"""Values of sampled and of scored tokens, on every path, are those of their hidden states."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm import LLM
from mlx_parallm.config import CacheConfig, ModelConfig, SpeculativeConfig
from mlx_parallm.models.decoder_classes import trunk_of
from mlx_parallm.models.value_heads import value_layer
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampledToken, TokenLogprob
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.row_selection import NO_HEAD
from mlx_parallm.worker.generation.value_heads import ValueHeads
from mlx_parallm.worker.weights.loader import load_model
from tests.compiled_attention import AheadAttention, CompiledAttention
from tests.decoder_folders import write_words
from tests.encoder_folders import write_golden
from tests.integration.test_parity_generate import (
    PATHS,
    Session,
    loaded_model,
    random_prompt,
    shared_runner,
)
from tests.value_heads import SCORE, TRL, head_tensors, write_critic

# TOLERANCE: of values; hidden states of the tiny models have norms of about 6.
TOLERANCE = 1e-5
GOLDEN = Path(__file__).parents[1] / "golden" / "value_heads"
PROMPT = random_prompt(21)
N = 3
#: REFUSED: its trunk returns logits.
REFUSED = "gemma3n"


@contextmanager
def critic(name: str) -> Iterator[Any]:
    """Give a shared model a value head for a while."""
    model = loaded_model(name).model
    hidden = trunk_of(model)(mx.array([[0]]))
    layer = nn.Linear(hidden.shape[-1], 1)
    layer.update({"weight": 0.1 * mx.random.normal(layer.weight.shape, key=mx.random.key(3))})
    model["v_head"] = {"summary": layer}
    try:
        yield model
    finally:
        del model["v_head"]


def expected(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Return the value of the state after each token but the last."""
    hidden = np.array(trunk_of(model)(mx.array([tokens]))[0].astype(mx.float32))
    layer = value_layer(model)
    return (hidden @ np.array(layer.weight).T + np.array(layer.bias))[:-1, 0]


def scores(
    name: str, backend: type[ReferenceAttention], texts: Sequence[Sequence[int]]
) -> list[list[TokenLogprob]]:
    """Return the entries of each text but those of its first token, computed in chunks."""
    session = Session(shared_runner(name, backend), budget=17)
    results: dict[str, list[TokenLogprob]] = {}
    for number, text in enumerate(texts):
        session.add(str(number), tuple(text), prompt_logprobs=0, max_tokens=0, values=True)
    while session.scheduler.has_work():
        batch = session.scheduler.schedule()
        assert batch is not None
        for update in session.scheduler.update(batch, session.runner.run(batch)):
            if update.prompt is not None:
                scored = update.prompt.prompt_logprobs or ()
                results[update.request_id] = [entry for entry in scored if entry is not None]
    return [results[str(number)] for number in range(len(texts))]


def values_of(tokens: Sequence[SampledToken]) -> list[Any]:
    return [token.logprob.value for token in tokens if token.logprob is not None]


def check(model: Any, session: Session, texts: dict[tuple[str, int], list[int]]) -> None:
    for key, text in texts.items():
        wanted = expected(model, text)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(values_of(session.tokens[key]), wanted, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *[(name, ReferenceAttention) for name in ("llama", "gemma2", "lfm2", "qwen3_5", "gpt_oss")],
        *[(name, AheadAttention) for name in ("llama", "qwen3_next")],
        *[(name, CompiledAttention) for name in ("llama", "qwen3_5")],
        *[
            pytest.param(name, ReferenceAttention, marks=pytest.mark.slow)
            for name in PATHS
            if name not in {"llama", "gemma2", "lfm2", "qwen3_5", "gpt_oss", REFUSED}
        ],
    ],
)
def test_values_are_those_of_hidden_states(name: str, backend: type[ReferenceAttention]) -> None:
    runner = shared_runner(name, backend)
    with critic(name) as model:
        assert ValueHeads(model, runner.stock.selector).why_none() is None
        session = Session(runner, budget=8)
        options: dict[str, Any] = {"temperature": 1.0, "values": True}
        session.add("group", PROMPT, n=N, seed=4, **options)
        session.step()
        session.add("again", PROMPT, seed=9, **options)
        session.add("plain", PROMPT, seed=2)
        session.finish()
        assert set(values_of(session.tokens["plain", 0])) == {None}
        texts = {
            key: [*PROMPT, *(token.token_id for token in tokens)]
            for key, tokens in session.tokens.items()
            if key[0] != "plain"
        }
        check(model, session, texts)
        scored = scores(name, backend, list(texts.values()))
        for text, entries in zip(texts.values(), scored, strict=True):
            values: list[Any] = [entry.value for entry in entries]
            np.testing.assert_allclose(values, expected(model, text), atol=TOLERANCE)


def why_none(name: str) -> str | None:
    return ValueHeads(loaded_model(name).model, shared_runner(name).stock.selector).why_none()


def test_other_states_than_the_last_norms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_none(REFUSED) == "its last hidden states could not be found"
    selector = shared_runner("llama").stock.selector
    note = selector.note
    monkeypatch.setattr(selector, "note", lambda hidden: note([2 * each for each in hidden]))
    assert why_none("llama") == "its LM head does not read the output of its last norm"
    monkeypatch.setattr(selector, "head", NO_HEAD)
    assert why_none("llama") == "its LM head could not be found"


def test_proposed_tokens_have_the_values_of_their_states() -> None:
    speculative = SpeculativeConfig(prompt_lookup_min=1, disable_by_batch_size=64)
    with critic("llama") as model:
        session = Session(shared_runner("llama"), budget=24, speculative=speculative)
        session.add("r", PROMPT, allowed_token_ids=(17,), max_tokens=24, values=True)
        session.finish()
        counts = session.scheduler.stats().speculation
        assert counts is not None
        assert counts.num_accepted_tokens > 0
        check(model, session, {("r", 0): [*PROMPT, *[17] * 24]})


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_values_are_those_of_trl(tmp_path: Path, path: Path) -> None:
    golden = json.loads(path.read_text(encoding="utf-8"))
    write_golden(tmp_path, golden)
    write_words(tmp_path, golden["config"]["vocab_size"])
    llm = LLM(str(tmp_path), cache=CacheConfig(kv_cache_bytes=1 << 20))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, values=True)
    prompts = [{"prompt_token_ids": ids} for ids in golden["inputs"]["input_ids"]]
    for output, values in zip(llm.generate(prompts, params), golden["values"], strict=True):
        entries: list[Any] = [entry and entry.value for entry in output.prompt_logprobs or ()]
        assert entries[0] is None
        np.testing.assert_allclose(entries[1:], values[:-1], atol=TOLERANCE)


@pytest.mark.parametrize("name", [TRL, "v_head", SCORE])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_folders_head_is_kept_in_float32(tmp_path: Path, name: str, has_bias: bool) -> None:
    head = head_tensors(1, name, has_bias=has_bias)
    model = load_model(ModelConfig(dtype="bfloat16"), write_critic(tmp_path, head)).model
    layer = value_layer(model)
    for key, array in head.items():
        kept = layer[key.rpartition(".")[2]]
        assert kept.dtype == mx.float32
        assert np.array_equal(np.array(kept), array)
    assert model.model.norm.weight.dtype == mx.bfloat16


def test_a_layer_of_several_labels_is_no_value_head(tmp_path: Path) -> None:
    (weight,) = head_tensors(1, SCORE, has_bias=False).values()
    folder = write_critic(tmp_path, {"score.weight": np.repeat(weight, 2, axis=0)})
    with pytest.raises(ModelLoadError, match="score is no value head"):
        load_model(ModelConfig(), folder)
