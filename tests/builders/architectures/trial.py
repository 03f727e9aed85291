"""Runs one architecture's tiny model as a served one would run, against mlx_lm alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.types.errors import ConfigError
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.generation.cache_layout import OpaqueLayout, leaves, probe_layout
from mlx_parallm.worker.generation.load.path_choice import PathChoice, checked_length, choose_path
from mlx_parallm.worker.generation.load.self_check import (
    TOLERANCE,
    CheckedText,
    largest_difference,
    stock_texts,
)
from mlx_parallm.worker.ops import at_once
from mlx_parallm.worker.sharding.check import check_shardable
from mlx_parallm.worker.sharding.sharding import cut_model
from tests.builders.architectures.configs import (
    LONG_LIMIT,
    VOCAB_SIZE,
    config_of,
    decoder_of,
    long_config_of,
)

BLOCK_SIZE = 4
# Texts of the second check, in tokens: two are longer than any limit of their model.
LONG_TEXTS = (20, LONG_LIMIT + 10, LONG_LIMIT + 93)
CHUNK = 11


def try_one(name: str) -> dict[str, Any]:
    """Return an architecture's path, difference and refusals, and its difference on long texts."""
    return {**_try_short(name), "long": _try_long(name)}


def try_ranks(name: str, ranks: Ranks) -> dict[str, Any]:
    """Return an architecture's path over ranks, and its difference from the whole model alone.

    The result of a model that these ranks cannot compute together is why it is refused.
    """
    config = config_of(name)
    whole = build(config)
    window = checked_length(whole, probe_layout(whole))
    texts = at_once(stock_texts)(whole, config["vocab_size"], window)
    model = build(config)
    try:
        check_shardable(model, config, Path(name), ranks.size)
    except ConfigError as refusal:
        return {"refused": str(refusal)}
    cut_model(model, ranks).add_up()
    choice = choose(model, config, ranks)
    return {
        "path": choice.name,
        "difference": at_once(largest_difference)(choice.path, texts, BLOCK_SIZE),
    }


def build(config: dict[str, Any]) -> Any:
    """Return a model with random weights, norms and biases included."""
    mx.random.seed(0)
    model = decoder_of(config)

    def disturb(parameter: mx.array) -> mx.array:
        if parameter.dtype == mx.uint32:  # packed weights
            return mx.random.randint(0, 2**31 - 1, parameter.shape).astype(mx.uint32)
        if not mx.issubdtype(parameter.dtype, mx.floating):
            return parameter
        return parameter.astype(mx.float32) + 0.05 * mx.random.normal(parameter.shape)

    model.update(tree_map(disturb, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _try_short(name: str) -> dict[str, Any]:
    config = config_of(name)
    model = build(config)
    choice = choose(model, config)
    agreeing = [attempt for attempt in choice.attempts if attempt.agrees]
    refused = [
        f"{attempt.path}: {attempt.error or f'differs by {attempt.difference:.1g}'}"
        for attempt in choice.attempts
        if not attempt.agrees
    ]
    result: dict[str, Any] = {"path": "alone", "difference": 0.0, "refused": refused}
    if agreeing:
        result |= {"path": agreeing[0].path, "difference": agreeing[0].difference}
    elif any(isinstance(layout, OpaqueLayout) for layout in leaves(probe_layout(model))):
        result["note"] = "has caches of a kind of its own"
    elif (difference := _stock_chunks_differ(build(config))) is not None:
        result["note"] = f"mlx_lm itself differs by {difference:.1g} when a prompt comes in chunks"
    return result


def _try_long(name: str) -> dict[str, Any]:
    """Return path and difference on long texts, for limits that no text of the check reaches."""
    config = long_config_of(name)
    # A path may leave its traces in a model, so the stock answers come from another.
    texts = [_stock_text(build(config), length) for length in LONG_TEXTS]
    choice = choose(build(config), config)
    path = next((attempt.path for attempt in choice.attempts if attempt.agrees), "alone")
    if path == "alone":
        return {"path": path, "difference": 0.0}
    try:
        difference = at_once(largest_difference)(choice.path, texts, BLOCK_SIZE)
        return {"path": path, "difference": difference}
    except MODEL_ERRORS as reason:
        return {"path": path, "error": f"{type(reason).__name__}: {reason}"}


def choose(
    model: Any,
    config: dict[str, Any],
    ranks: Ranks | None = None,
    *,
    attention: type[ReferenceAttention] = ReferenceAttention,
) -> PathChoice:
    """Return the path that a model takes with this attention."""
    return at_once(choose_path)(
        model,
        probe_layout(model),
        attention(BLOCK_SIZE),
        vocab_size=config["vocab_size"],
        num_blocks=len(LONG_TEXTS) * (-(-(max(LONG_TEXTS) + BLOCK_SIZE) // BLOCK_SIZE)),
        block_size=BLOCK_SIZE,
        dtype="float32",
        ranks=ranks,
    )


def _stock_text(model: Any, length: int, *, chunk: int | None = None) -> CheckedText:
    """Return random tokens and mlx_lm's log-probabilities: a prompt, maybe in chunks, and three."""
    source = random.Random(length)
    tokens = [source.randrange(VOCAB_SIZE) for _ in range(length + 3)]
    step = chunk or length
    parts = [tokens[first : min(first + step, length)] for first in range(0, length, step)]
    caches = make_prompt_cache(model)
    rows = [
        model(mx.array([part]), cache=caches)[0]
        for part in [*parts, *([token] for token in tokens[length:])]
    ]
    logits = mx.concatenate(rows).astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logprobs)
    return CheckedText(tokens, logprobs, mx.ones_like(logprobs))


def _stock_chunks_differ(model: Any) -> float | None:
    """Return the difference that cutting a prompt makes in mlx_lm itself; None if it makes none."""
    whole, cut = (_stock_text(model, 34, chunk=chunk).logprobs for chunk in (None, CHUNK))
    apart = mx.where(whole == cut, 0.0, mx.abs(whole - cut)).max().item()
    return apart if isinstance(apart, float) and apart > TOLERANCE["float32"] else None
