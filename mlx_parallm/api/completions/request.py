"""From the body of a completion request to one engine request per prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mlx_parallm.api.completions.embeds import read_embeds
from mlx_parallm.api.completions.infill import infill_ids, with_infill_ends
from mlx_parallm.api.completions.schema import CompletionRequest
from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.turns.constraints import body_grammar
from mlx_parallm.api.turns.fields import sampling_params
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.api.turns.logprobs import most_asked
from mlx_parallm.api.turns.prelude import Prelude
from mlx_parallm.api.turns.prepare import TRUNCATE, prompt_limit
from mlx_parallm.api.turns.sources import Side, SourceForm, read_source, source_params
from mlx_parallm.generation.model import GenerationModel, Tokenizer
from mlx_parallm.tokenizer.cut import cut_ids
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.model_input import ModelInput
from mlx_parallm.types.request import INPUT_TOKEN, GenerateRequest, SamplingParams
from mlx_parallm.types.step import RunnerInfo
from mlx_parallm.types.token_limit import TokenLimit

# What the body calls the engine's names.
FIELDS = {"messages": "prompt", "beam_width": "n"}
SOURCE_FIELDS = {"messages": "decoder_prompt", "beam_width": "n"}


class Prompt(NamedTuple):
    """A prompt of the body.

    Attributes:
        text: the prompt as text, which only ``echo`` needs; "" if it did not come as one. For
            an encoder-decoder, what the decoder begins with.
        ids: its tokens; ``INPUT_TOKEN`` for rows.
        inputs: its rows, if it came as such, or its source.
    """

    text: str
    ids: tuple[int, ...]
    inputs: tuple[ModelInput, ...] = ()


def fields_of(model: GenerationModel) -> dict[str, str]:
    """Return what the body calls the engine's names."""
    return SOURCE_FIELDS if model.takes_sources else FIELDS


async def completion_requests(
    body: CompletionRequest, prelude: Prelude, model: GenerationModel, *, answer_id: str
) -> tuple[list[GenerateRequest], list[Prompt]]:
    """Return the engine's request for each prompt, and the prompts.

    Raises:
        InvalidRequestError: a field is out of range, or wants what is not served.
    """
    body.check_supported()
    body.check_sources(takes_sources=model.takes_sources)
    with named_by(FIELDS):
        prelude.check_room(body.num_prompts(), body.n)
    params = await _params(body, prelude, model)
    with named_by(FIELDS):
        encode = _encode_sources if model.takes_sources else _encode_prompts
        prompts = await encode(body, model)
    if body.suffix:
        params = with_infill_ends(params, model.tokenizer)
    requests = [
        GenerateRequest(
            request_id=answer_id if len(prompts) == 1 else f"{answer_id}-{number}",
            model=model.names[0],
            prompt_ids=prompt.ids,
            inputs=prompt.inputs,
            params=_own_params(params, body, model, prompt),
            priority=body.priority,
            client=prelude.client,
            cache_salt=body.cache_salt,
            group=answer_id,
        )
        for number, prompt in enumerate(prompts)
    ]
    return requests, prompts


def _own_params(
    params: SamplingParams, body: CompletionRequest, model: GenerationModel, prompt: Prompt
) -> SamplingParams:
    """Return the parameters of one prompt."""
    if not model.takes_sources:
        return params
    params = source_params(params, model, len(prompt.ids), named=body.model_fields_set)
    if params.beams is None or body.decoder_prompt or body.decoder_input_ids:
        return params
    # What the model's files force behind the start counts as generated in transformers.
    return replace(params, beams=replace(params.beams, num_counted=len(prompt.ids) - 1))


async def _params(
    body: CompletionRequest, prelude: Prelude, model: GenerationModel
) -> SamplingParams:
    # Both show the prompt's tokens, each with its own number of alternatives.
    shown = (body.prompt_logprobs, body.top() if body.echo else None)
    # The length of an encoder-decoder's output depends on its files.
    has_length = "max_tokens" in body.model_fields_set or not model.takes_sources
    return sampling_params(
        body,
        max_logprobs=prelude.config.max_logprobs,
        max_tokens=body.max_tokens if has_length else None,
        logprobs=body.top(),
        prompt_logprobs=most_asked(shown),
        grammar=await body_grammar(body, model),
        **body.beam_values(),
    )


async def _encode_prompts(body: CompletionRequest, model: GenerationModel) -> list[Prompt]:
    """Return every prompt: those that come as rows, then those of texts or tokens.

    With a suffix the tokens are those around a gap, and the text is what stands before it. Prompts
    are cut where the body says so; their texts then are what is left of them.

    Raises:
        InvalidRequestError: there is an empty prompt, or none and no token begins a document; there
            is a suffix, and a prompt is no text, the model cannot fill in, or prompts are to be
            cut.
    """
    if body.begins_document:
        return [_empty_document(model.tokenizer)]
    embeds, prompts, tokenizer = body.embeds(), body.prompts(), model.tokenizer
    limit = prompt_limit(
        body.truncate_prompt_tokens,
        body.truncation_side,
        max_tokens=body.max_tokens,
        max_model_len=model.info.max_model_len,
    )
    if body.suffix and limit is not None:
        raise InvalidRequestError("A prompt with a suffix is not cut.", param=TRUNCATE)

    def encode() -> list[Prompt]:
        rows = [_rows_prompt(text, model.info) for text in embeds]
        return rows + [_encode_prompt(prompt, body, tokenizer, limit) for prompt in prompts]

    suffixes = len(prompts) * len(body.suffix or "")
    length = sum(len(prompt) for prompt in (*embeds, *prompts))
    return await maybe_in_thread(encode, length + suffixes)


async def _encode_sources(body: CompletionRequest, model: GenerationModel) -> list[Prompt]:
    """Return the source and the decoder's tokens of every prompt.

    Raises:
        InvalidRequestError: see ``read_source`` and ``CompletionRequest.decoder_prompts``.
    """
    if body.begins_document:
        raise InvalidRequestError("The prompt is missing: it is the source.", param="prompt")
    prompts = body.prompts()
    decoders = body.decoder_prompts(len(prompts))
    is_left = "truncation_side" in body.model_fields_set and body.truncation_side == "left"
    form = SourceForm(
        src_lang=body.src_lang,
        tgt_lang=body.tgt_lang,
        truncate=body.truncate_prompt_tokens,
        from_left=is_left,
        add_special_tokens=body.add_special_tokens,
    )

    def encode() -> list[Prompt]:
        pairs = zip(prompts, decoders, strict=True)
        return [_encode_source(prompt, decoder, form, body, model) for prompt, decoder in pairs]

    length = sum(len(each) for each in (*prompts, *decoders) if each is not None)
    return await maybe_in_thread(encode, length)


def _encode_source(
    source: Side,
    decoder: Side | None,
    form: SourceForm,
    body: CompletionRequest,
    model: GenerationModel,
) -> Prompt:
    read = read_source(source, model, form, decoder)
    text = read.text
    if body.echo and not isinstance(decoder, str):
        text = model.tokenizer.decode(read.token_ids)
    return Prompt(text, read.token_ids, read.inputs)


def _empty_document(tokenizer: Tokenizer) -> Prompt:
    """Return what stands before every text: most tokenizers add it, some models only name it."""
    ids = tuple(tokenizer.encode(""))
    if ids:
        return Prompt("", ids)
    if tokenizer.bos_id is None:
        raise InvalidRequestError(
            "The prompt is missing, and this model has no token that begins a text.", param="prompt"
        )
    return Prompt("", (tokenizer.bos_id,))


def _rows_prompt(text: str, info: RunnerInfo) -> Prompt:
    rows = read_embeds(text, info)
    return Prompt("", (INPUT_TOKEN,) * len(rows.span or ()), (rows,))


def _encode_prompt(
    prompt: str | list[int],
    body: CompletionRequest,
    tokenizer: Tokenizer,
    limit: TokenLimit | None,
) -> Prompt:
    if body.suffix:
        if not isinstance(prompt, str):
            raise InvalidRequestError("With a suffix, prompts must be texts.", param="prompt")
        special = body.add_special_tokens
        ids = infill_ids(prompt, body.suffix, tokenizer, add_special_tokens=special)
        return Prompt(prompt, ids)
    special = body.add_special_tokens and isinstance(prompt, str)
    if isinstance(prompt, str):
        whole = tuple(tokenizer.encode(prompt, add_special_tokens=special, limit=limit))
    else:
        whole = tuple(prompt)
    ids = whole if limit is None else _cut(whole, limit, tokenizer, special=special)
    if isinstance(prompt, str) and len(ids) == len(whole):
        return Prompt(prompt, ids)
    known = all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
    return Prompt(tokenizer.decode(ids) if body.echo and known else "", ids)


def _cut(
    ids: tuple[int, ...], limit: TokenLimit, tokenizer: Tokenizer, *, special: bool
) -> tuple[int, ...]:
    """Return a prompt as short as the limit says; a text keeps the special tokens before it."""
    assert limit.most is not None, "a limit that cuts has a number"
    begin = tuple(tokenizer.encode("")) if special else ()
    return cut_ids(ids, limit.most, from_left=limit.from_left, begin=begin)
