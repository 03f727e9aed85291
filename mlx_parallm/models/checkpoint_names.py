"""The mapping of names in checkpoints to the names of a model's parameters.

Hugging Face saved the same model in several ways: a bare model without the prefix of its trunk,
layer norms with TensorFlow's gamma and beta, buffers of positions, decoders that are the table of
word embeddings.
"""

from __future__ import annotations

import mlx.core as mx

Weights = dict[str, mx.array]

#: ``BUFFERS``: buffers with constant values, 0, 1, 2, ... or zeros, which the models do not need.
BUFFERS = ("position_ids", "token_type_ids")
LEGACY_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def modern_names(weights: Weights, trunk: str, parts: tuple[str, ...]) -> Weights:
    """Return the weights by today's names, with the trunk's prefix and without buffers.

    Args:
        weights: a checkpoint's weights, by name.
        trunk: the name of the trunk, such as ``bert``.
        parts: the modules directly in it; names that begin with one of them lack the prefix.
    """
    renamed = {}
    for name, array in weights.items():
        if name.rsplit(".", 1)[-1] in BUFFERS:
            continue
        for old, new in LEGACY_ENDINGS.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        bare = name.split(".", 1)[0] in parts
        renamed[f"{trunk}.{name}" if bare else name] = array
    return renamed


def without(weights: Weights, *prefixes: str) -> Weights:
    """Return the weights whose names begin with none of these."""
    return {name: array for name, array in weights.items() if not name.startswith(prefixes)}


def with_decoder(weights: Weights, decoder: str, bias: str, *, table: str | None) -> Weights:
    """Return the weights with a masked LM's output bias under one name, and with no tied decoder.

    A checkpoint has the bias under the decoder's name, beside the decoder, or both; and it has the
    decoder, the table that it is tied to, or both. A decoder that differs from its table stays, so
    that the loader reports it.

    Args:
        weights: by today's names.
        decoder: the name of the linear layer that gives logits.
        bias: the new name of its bias.
        table: the name of the word embeddings' weight if the decoder is tied to it.
    """
    kept = dict(weights)
    own = kept.pop(f"{decoder}.bias", None)
    # Only an untied decoder uses its own bias instead of the one beside it.
    if own is not None and (table is None or bias not in kept):
        kept[bias] = own
    weight = kept.get(f"{decoder}.weight")
    if table is None or weight is None:
        return kept
    if mx.array_equal(weight, kept.setdefault(table, weight)).item():
        del kept[f"{decoder}.weight"]
    return kept
