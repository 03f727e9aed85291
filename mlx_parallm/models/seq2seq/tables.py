"""The table of word embeddings, which a checkpoint has under several names."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from mlx_parallm.models.checkpoint_names import Weights

#: ``PARTS``: the arrays of a table, which may be quantised.
PARTS = ("weight", "scales", "biases")
HEAD = "lm_head"
#: ``TABLES``: the modules that a checkpoint may have the table in.
TABLES = ("shared", "embed_tokens")


def one_table(weights: Weights, name: str, copies: Iterable[str]) -> Weights:
    """Return the weights with one table under ``name``, which any of its copies may be.

    A copy that differs stays, so that the loader reports it.
    """
    kept = dict(weights)
    for copy in copies:
        if all(_is_equal(kept, name, copy, part) for part in PARTS):
            for part in PARTS:
                array = kept.pop(f"{copy}.{part}", None)
                if array is not None:
                    kept[f"{name}.{part}"] = array
    return kept


def has_own_head(weights: Weights) -> bool:
    """Return True if a checkpoint has a head that is no table of word embeddings."""
    if f"{HEAD}.weight" not in weights:
        return False
    modules = {name.rpartition(".")[0] for name in weights}
    tables = [module for module in modules if module.rpartition(".")[2] in TABLES]
    return not any(all(_is_equal(weights, each, HEAD, part) for part in PARTS) for each in tables)


def _is_equal(weights: Weights, table: str, copy: str, part: str) -> bool:
    """Return True unless both have this part and it differs."""
    first, second = weights.get(f"{table}.{part}"), weights.get(f"{copy}.{part}")
    return first is None or second is None or bool(mx.array_equal(first, second).item())
