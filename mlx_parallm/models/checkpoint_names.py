"""From the names that checkpoints were saved with to those of a model's parameters.

Hugging Face saved the same model in several ways: a bare model without the prefix of its trunk,
layer norms with TensorFlow's gamma and beta, buffers of positions, decoders that are the table of
word embeddings.
"""

from __future__ import annotations

import mlx.core as mx

Weights = dict[str, mx.array]

#: Buffers that hold no more than 0, 1, 2, ... or zeros.
BUFFERS = ("position_ids", "token_type_ids")
LEGACY_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def modern_names(weights: Weights, trunk: str, parts: tuple[str, ...]) -> Weights:
    """Weights by today's names, with the trunk's prefix and without buffers.

    Args:
        weights: a checkpoint's, by name.
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
    """The weights whose names begin with none of these."""
    return {name: array for name, array in weights.items() if not name.startswith(prefixes)}


def with_decoder(weights: Weights, decoder: str, bias: str, *, table: str | None) -> Weights:
    """The weights with a masked LM's output bias under one name, and with no tied decoder.

    Checkpoints have the bias as the decoder's, beside the decoder, or as both; and of a decoder
    and the table it is tied to, either or both. A decoder that differs from its table stays, and
    is then left over.

    Args:
        weights: by today's names.
        decoder: the name of the linear layer that gives logits.
        bias: the name that its bias gets.
        table: the name of the word embeddings' weight if the decoder is tied to it.
    """
    kept = dict(weights)
    own = kept.pop(f"{decoder}.bias", None)
    # Only an untied decoder adds its own bias rather than the one beside it.
    if own is not None and (table is None or bias not in kept):
        kept[bias] = own
    weight = kept.get(f"{decoder}.weight")
    if table is None or weight is None:
        return kept
    if mx.array_equal(weight, kept.setdefault(table, weight)).item():
        del kept[f"{decoder}.weight"]
    return kept
