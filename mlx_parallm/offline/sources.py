"""Prompts of ``LLM`` for encoder-decoders: sources, and what the decoder begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.api.turns.sources import Side, SourceForm, read_source, source_params
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.images.prompt import ImagePrompt
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_mapping, is_sequence
from mlx_parallm.types.request import SamplingParams

# TEXT, TOKEN_IDS: of a side in vLLM's form.
TEXT, TOKEN_IDS = "prompt", "prompt_token_ids"
# SOURCE, DECODER: the sides in vLLM's form. A prompt without sides is a source.
SOURCE, DECODER = "encoder_prompt", "decoder_prompt"
LANGUAGES = ("src_lang", "tgt_lang")
FIELDS = frozenset({TEXT, TOKEN_IDS, SOURCE, DECODER, *LANGUAGES})


def source_prompt(
    prompt: str | Sequence[int] | Mapping[str, Any], model: GenerationModel
) -> ImagePrompt:
    """Return a prompt as a source, with the tokens that the decoder begins with.

    Args:
        prompt: the source, as text or tokens; or vLLM's mapping with "encoder_prompt" and perhaps
            "decoder_prompt", and with "src_lang" and "tgt_lang".
        model: an encoder-decoder.

    Raises:
        InvalidRequestError: see ``read_source``; the mapping has something else.
    """
    if not is_mapping(prompt):
        return read_source(_side(prompt, TEXT), model, SourceForm(param=TEXT))
    unknown = sorted(set(prompt) - FIELDS)
    if unknown:
        raise InvalidRequestError(f"A prompt has no {unknown[0]!r}.", param=unknown[0])
    source = prompt.get(SOURCE)
    if source is None:
        source = {name: prompt[name] for name in (TEXT, TOKEN_IDS) if name in prompt}
    decoder = prompt.get(DECODER)
    src_lang, tgt_lang = (prompt.get(name) for name in LANGUAGES)
    form = SourceForm(src_lang=src_lang, tgt_lang=tgt_lang, param=SOURCE)
    return read_source(
        _side(source, SOURCE), model, form, None if decoder is None else _side(decoder, DECODER)
    )


def _side(value: Any, name: str) -> Side:
    """Return a text or tokens; vLLM's mappings have them under "prompt" or "prompt_token_ids"."""
    if is_mapping(value):
        forms = [value[key] for key in (TEXT, TOKEN_IDS) if value.get(key) is not None]
        value = forms[0] if len(forms) == 1 else None
    if isinstance(value, str):
        return value
    if is_sequence(value) and all(isinstance(each, int) for each in value):
        return list(value)
    raise InvalidRequestError(f"{name} must be a text or token ids.", param=name)


def conversation_prompt(
    conversation: Sequence[Mapping[str, Any]], model: GenerationModel, **options: Any
) -> ImagePrompt:
    """Return a conversation, as the chat template renders it, as a source.

    Raises:
        InvalidRequestError: there is no template, or it refuses the messages.
    """
    text = model.tokenizer.render_chat(conversation, **options)
    form = SourceForm(add_special_tokens=False, param="messages")
    return read_source(text, model, form)._replace(text=text)


def with_lengths(params: SamplingParams, model: GenerationModel, prompt_len: int) -> SamplingParams:
    """Return parameters with the lengths that the model's files have where these name none."""
    named = ["max_tokens"] * (params.max_tokens is not None)
    named += ["min_tokens"] * (params.min_tokens > 0)
    return source_params(params, model, prompt_len, named=named)
