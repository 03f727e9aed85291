"""The table of word embeddings, which a checkpoint has under several names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx

from mlx_parallm.models.checkpoint_names import Weights
from mlx_parallm.models.checkpoints.encoder_decoders import SHARED_FIELD
from mlx_parallm.types.errors import ModelLoadError

HEAD = "lm_head"
#: ``HEADS``: the modules that a checkpoint may have its head in; the second one is Whisper's.
HEADS = (HEAD, "proj_out")
LOGITS_BIAS = "final_logits_bias"
POSITIONS = "encoder.embed_positions.weight"
SHARED = "shared"
#: ``TABLES``: the modules that a checkpoint may have the table in.
TABLES = (SHARED, "embed_tokens")
#: ``PARTS``: the arrays of a table, which may be quantised.
PARTS = ("weight", "scales", "biases")


def one_table(weights: Weights, name: str, copies: Iterable[str]) -> Weights:
    """Return the weights with one table under ``name``, or else the first of its copies."""
    kept = dict(weights)
    for copy in copies:
        for part in PARTS:
            array = kept.pop(f"{copy}.{part}", None)
            if array is not None:
                kept.setdefault(f"{name}.{part}", array)
    return kept


def saved_fields(config: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """Return the fields of a config that the files decide: if there is a head, and so on.

    Raises:
        ModelLoadError: the files are an encoder's alone, or source and target have word embeddings
            that the model cannot have.
    """
    if not any("decoder" in name.split(".") for name in weights):
        raise ModelLoadError("the files have no decoder, and an encoder alone is not served.")
    if config.get(SHARED_FIELD, True):
        check_tables(weights)
    return {
        "tie_word_embeddings": not has_own_head(weights),
        "has_final_logits_bias": LOGITS_BIAS in weights,
        "has_position_tables": any(name.endswith(POSITIONS) for name in weights),
    }


def has_own_head(weights: Weights) -> bool:
    """Return True if a checkpoint has a head that is no table of word embeddings."""
    tables = _tables(weights)
    head = next((name for name in HEADS if f"{name}.weight" in weights), None)
    if head is None or not tables:
        return False
    return not any(_are_equal(weights, table, head) for table in tables)


def check_tables(weights: Weights) -> None:
    """Raise ModelLoadError if source and target have other word embeddings than the shared ones."""
    tables = _tables(weights)
    for table in tables:
        if not _are_equal(weights, table, tables[0]):
            raise ModelLoadError(
                f"{table} and {tables[0]} differ, and only Marian has word embeddings of each side."
            )


def _tables(weights: Weights) -> list[str]:
    modules = {name.rpartition(".")[0] for name in weights}
    return sorted(module for module in modules if module.rpartition(".")[2] in TABLES)


def _are_equal(weights: Weights, first: str, second: str) -> bool:
    """Return True if two modules have the same parts with the same numbers."""
    for part in PARTS:
        array, other = weights.get(f"{first}.{part}"), weights.get(f"{second}.{part}")
        if array is None or other is None:
            if array is not other:
                return False
        elif not mx.array_equal(array, other).item():
            return False
    return True
