"""Resolves the tokens that a checkpoint's files name for late interaction."""

from __future__ import annotations

from dataclasses import replace

from mlx_parallm.models.checkpoints.late_interaction import LateSpec
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.pooling import PoolingInfo


def with_late_interaction(
    info: PoolingInfo, spec: LateSpec, tokenizer: EncoderTokenizer, *, reads_on: bool
) -> PoolingInfo:
    """Return the facts of a model that was trained for late interaction.

    Args:
        info: the facts without it.
        spec: what its files say about it.
        tokenizer: the model's tokenizer.
        reads_on: True if tokens attend only to earlier tokens.

    Raises:
        ModelLoadError: a token that queries need is not in the vocabulary; or the model is causal,
            and its queries are padded with tokens that others must not attend to.
    """
    query, query_text = _marked(spec.query_prefix, tokenizer)
    document, document_text = _marked(spec.document_prefix, tokenizer)
    settings = spec.settings
    # Words that are no tokens never occur in a text.
    skipped = (tokenizer.token_id(word) for word in spec.skipped)
    if settings.expands_to and reads_on and not settings.attends_to_expansion:
        raise ModelLoadError(
            "A causal model cannot be served if its queries have tokens that others do not attend "
            "to."
        )
    late = replace(
        settings,
        query_prefix=query,
        document_prefix=document,
        expansion_id=_expansion_id(spec, tokenizer) if settings.expands_to else None,
        skipped_ids=frozenset(token_id for token_id in skipped if token_id is not None),
    )
    prefixes = {"query": query_text, "document": document_text}
    changed = {name: text + info.prompts.get(name, "") for name, text in prefixes.items() if text}
    return replace(info, late=late, prompts={**info.prompts, **changed})


def _marked(prefix: str, tokenizer: EncoderTokenizer) -> tuple[tuple[int, ...], str]:
    """Return a prefix as token ids, or as text if the vocabulary does not have it."""
    if not prefix.strip():
        return (), prefix
    for token in (prefix, prefix.split()[0]):
        token_id = tokenizer.token_id(token)
        if token_id is not None:
            return (token_id,), ""
    return (), prefix


def _expansion_id(spec: LateSpec, tokenizer: EncoderTokenizer) -> int:
    token = spec.expansion_token or tokenizer.mask_token
    token_id = None if token is None else tokenizer.token_id(token)
    if token_id is None:
        raise ModelLoadError(f"Queries are padded with {token}, which is not a token of the model.")
    return token_id
