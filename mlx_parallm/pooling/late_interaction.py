"""From the words of a checkpoint's files on late interaction to tokens of its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlx_parallm.models.checkpoints.late_interaction import LateSpec
from mlx_parallm.pooling.model import TextEncoder
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.pooling import EncoderInfo


def with_late_interaction(
    info: EncoderInfo, spec: LateSpec, tokenizer: TextEncoder, *, reads_on: bool
) -> EncoderInfo:
    """The facts of a model that was made for late interaction.

    Args:
        info: what was found out so far.
        spec: what its files say.
        tokenizer: the model's.
        reads_on: whether tokens attend to those before them only.

    Raises:
        ModelLoadError: a token that queries need is not in the vocabulary; or they need tokens that
            others do not attend to, where each attends to all before it.
    """
    query, query_text = _marked(spec.query_prefix, tokenizer)
    document, document_text = _marked(spec.document_prefix, tokenizer)
    settings = spec.settings
    if settings.expands_to and reads_on and not settings.attends_to_expansion:
        raise ModelLoadError(
            "Queries with tokens that others do not attend to are not served by a causal model."
        )
    late = replace(
        settings,
        query_prefix=query,
        document_prefix=document,
        expansion_id=_expansion_id(spec, tokenizer) if settings.expands_to else None,
        skipped_ids=frozenset(_known(spec.skipped, tokenizer)),
    )
    prompts = _before(info.prompts, {"query": query_text, "document": document_text})
    return replace(info, late=late, prompts=prompts)


def _marked(prefix: str, tokenizer: TextEncoder) -> tuple[tuple[int, ...], str]:
    """A prefix as a token, or as a text where the vocabulary does not have it."""
    if not prefix.strip():
        return (), prefix
    for token in (prefix, prefix.split()[0]):
        found = tokenizer.token_id(token)
        if found is not None:
            return (found,), ""
    return (), prefix


def _before(prompts: Mapping[str, str], texts: Mapping[str, str]) -> Mapping[str, str]:
    """Prompts with these texts before them."""
    changed = {name: text + prompts.get(name, "") for name, text in texts.items() if text}
    return {**prompts, **changed}


def _expansion_id(spec: LateSpec, tokenizer: TextEncoder) -> int:
    token = spec.expansion_token or tokenizer.mask_token
    found = None if token is None else tokenizer.token_id(token)
    if found is None:
        raise ModelLoadError(f"Queries are filled up with {token}, which is no token of the model.")
    return found


def _known(words: tuple[str, ...], tokenizer: TextEncoder) -> list[int]:
    """The ids of words that are tokens; others are never found in a text."""
    found = [tokenizer.token_id(word) for word in words]
    return [one for one in found if one is not None]
