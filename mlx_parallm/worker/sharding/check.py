"""Checks that a model can be cut into the parts of several ranks, before its weights are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.models.load_failures import reason
from mlx_parallm.models.seq2seq.interface import is_encoder_decoder
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.sharding.stock_shard import Rank, copy_structure, run_shard

#: ``QUERY_HEADS``: the field of config.json that every ``shard`` divides.
QUERY_HEADS = "num_attention_heads"
KV_HEADS = "num_key_value_heads"
#: ``COUNTS``: fields of config.json that messages give.
COUNTS = (QUERY_HEADS, KV_HEADS)
#: ``KV_NAME``: what the attributes of modules for the number of KV heads have in their names.
KV_NAME = re.compile("kv|key_value")


def check_shardable(model: Any, config: Mapping[str, Any], path: Path, size: int) -> None:
    """Raise ConfigError unless ``size`` ranks can compute a model together.

    Args:
        model: the model, whose weights may be lazy; they are neither computed nor changed.
        config: its config.json.
        path: its folder, for the message.
        size: the number of ranks.
    """
    if is_encoder_decoder(model):
        raise _refusal(config, path, size, "an encoder-decoder runs in one process")
    if not hasattr(model, "shard"):
        raise _refusal(config, path, size, "mlx_lm has no method shard for this architecture")
    cut = copy_structure(model)
    before = dict(_counts(cut))
    try:
        run_shard(cut, Rank(0, size))
    except MODEL_ERRORS as cause:
        raise _refusal(config, path, size, _fault(config, size, cause)) from cause
    for place, after in _counts(cut):
        count = before.get(place, after)
        if after != count and not _is_share(count, after, size):
            field = KV_HEADS if KV_NAME.search(place[1]) else place[1]
            fault = _divided_heads(config, size) or _indivisible(field, count, size)
            raise _refusal(config, path, size, fault)


def _counts(model: Any) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield the whole numbers among the attributes of modules, by path and name."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int) and not isinstance(value, bool):
                yield (path, name), value


def _is_share(count: int, share: int, size: int) -> bool:
    """True if ``share`` is a rank's of ``count``; several ranks may have the same one."""
    return share * size == count or (share == 1 and size % count == 0)


def _head_counts(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of heads that a config.json gives, by its fields."""
    text = config.get("text_config") or {}
    counts = {field: config.get(field, text.get(field)) for field in COUNTS}
    return {field: count for field, count in counts.items() if isinstance(count, int)}


def _fault(config: Mapping[str, Any], size: int, cause: BaseException) -> str:
    """Return why a model's ``shard`` failed."""
    heads = _divided_heads(config, size)
    kv_heads = _head_counts(config).get(KV_HEADS, size)
    if heads is None and isinstance(cause, ArithmeticError | AssertionError) and kv_heads % size:
        # A rank would have no KV head.
        return _indivisible(KV_HEADS, kv_heads, size)
    return heads or reason(cause).rstrip(".?")


def _divided_heads(config: Mapping[str, Any], size: int) -> str | None:
    """Return the fault of a number of heads that ranks cannot share; None if they can."""
    heads = _head_counts(config).get(QUERY_HEADS, size)
    return _indivisible(QUERY_HEADS, heads, size) if heads % size else None


def _indivisible(field: str, count: int, size: int) -> str:
    return f"{size} does not divide its {field} of {count}"


def _refusal(config: Mapping[str, Any], path: Path, size: int, fault: str) -> ConfigError:
    known = [f"{field} {count}" for field, count in _head_counts(config).items()]
    facts = ", ".join([str(config.get("model_type")), *known])
    return ConfigError(f"{path} ({facts}) cannot be computed by {size} ranks: {fault}.")
