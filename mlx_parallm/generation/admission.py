"""Checks at the door that need no engine state, so that bad input never reaches a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mlx_parallm.grammar.regex.search import check_stop_expressions
from mlx_parallm.types.beams import BeamParams
from mlx_parallm.types.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.types.model_input import InputKind, ModelInput, num_source_tokens, tokens_of
from mlx_parallm.types.request import ALL_TOKENS, GenerateRequest, SamplingParams
from mlx_parallm.types.step import RunnerInfo

# Numbers of a prompt, some 100 bytes each until they are written.
MAX_PROMPT_LOGPROBS = 1 << 23


def check_request(request: GenerateRequest, info: RunnerInfo) -> None:
    """Refuse a request that this model can never serve.

    Raises:
        InvalidRequestError: an empty prompt; a token id the embedding table does not have, which
            returns garbage or crashes the process; more ``min_tokens`` than have room; an
            expression that cannot end a text; or an input that the model does not take.
        ContextLengthError: the prompt, or the prompt and ``max_tokens``, exceed the context length.
    """
    if not request.prompt_ids:
        raise InvalidRequestError("The prompt must not be empty.", param="prompt")
    params = request.params
    assert params.structured_outputs is None, "its caller makes a grammar of it"
    _check_ids("prompt", request.prompt_ids, info.vocab_size)
    _check_token_ids(params, info.vocab_size)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise InvalidRequestError("allowed_token_ids must not be empty.", param="allowed_token_ids")
    if params.allowed_token_ids is not None and params.grammar is not None:
        raise InvalidRequestError(
            "allowed_token_ids cannot be combined with structured output.",
            param="allowed_token_ids",
        )
    if params.stop_regex:
        _check_stop_regex(params.stop_regex)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > info.vocab_size:
            raise InvalidRequestError(f"{name} exceeds the vocabulary.", param=name)
    _check_prompt_logprobs(len(request.prompt_ids), params.prompt_logprobs, info.vocab_size)
    check_length(len(request.prompt_ids), params.max_tokens, info.max_model_len)
    if request.inputs or InputKind.SOURCE in info.input_kinds:
        _check_inputs(request, info)
    _check_min_tokens(params.min_tokens, info.max_model_len - len(request.prompt_ids))


def _check_stop_regex(expressions: tuple[str, ...]) -> None:
    try:
        check_stop_expressions(expressions)
    except InvalidRequestError as refusal:
        refusal.param = "stop_regex"
        raise


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters with token ids that the model does not have."""
    _check_ids("logit_bias", (token_id for token_id, _ in params.logit_bias), vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logprob_token_ids", params.logprob_token_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("begin_banned_ids", params.begin_banned_ids, vocab_size)
    if (rule := params.timestamps) is not None:
        _check_ids("timestamps", (rule.begin_id, rule.end_id, rule.off_id), vocab_size)
    if params.forced_eos_id is not None:
        _check_ids("forced_eos_id", (params.forced_eos_id,), vocab_size)
    if (budget := params.thinking_budget) is not None:
        marks = (budget.end_id,) if budget.start_id is None else (budget.start_id, budget.end_id)
        _check_ids("thinking_token_budget", marks, vocab_size)


def _check_inputs(request: GenerateRequest, info: RunnerInfo) -> None:
    """Refuse inputs besides tokens that the model does not take or whose rows do not fit."""
    has_rows_only = any(each.kind is InputKind.PROMPT_EMBEDS for each in request.inputs)
    if has_rows_only and request.params.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs needs a prompt of tokens.", param="prompt_logprobs"
        )
    num_sources = sum(each.kind is InputKind.SOURCE for each in request.inputs)
    if num_sources > 1 or (InputKind.SOURCE in info.input_kinds and not num_sources):
        raise InvalidRequestError("A request to this model has one source.", param="prompt")
    end = 0
    for each in sorted(request.inputs, key=lambda item: item.span.start if item.span else 0):
        _check_input(each, info)
        if each.span is None:
            continue
        if not end <= each.span.start < each.span.stop <= len(request.prompt_ids):
            raise InvalidRequestError(
                f"The rows at {each.span.start} to {each.span.stop - 1} overlap or exceed the "
                "prompt.",
                param=each.kind.value,
            )
        end = each.span.stop


def _check_input(each: ModelInput, info: RunnerInfo) -> None:
    name = each.kind.value
    if each.kind not in info.input_kinds:
        raise InvalidRequestError(f"This model does not take {name}.", param=name)
    is_source = each.kind is InputKind.SOURCE
    if is_source != (each.span is None) or is_source != (each.num_kv_tokens > 0):
        raise InvalidRequestError(f"This model does not take such {name}.", param=name)
    if each.num_kv_tokens > info.max_source_len:
        raise ContextLengthError(
            info.max_source_len,
            f"However, the source has {each.num_kv_tokens} tokens. Please shorten it, or set "
            "truncate_prompt_tokens.",
            param="prompt",
        )
    if is_source:
        _check_ids("prompt", tokens_of(each), info.source_vocab_size or info.vocab_size)
    if each.kind is not InputKind.PROMPT_EMBEDS or each.span is None:
        return
    shape = each.arrays["rows"].shape
    if shape != (len(each.span), info.input_width):
        raise InvalidRequestError(
            f"{name} has the shape {list(shape)}; this model takes rows of {info.input_width}.",
            param=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRoom:
    """The bounds of a request besides its model.

    Attributes:
        max_len: longest sequence, in tokens; at most what the pool holds.
        num_blocks: KV blocks of the pool.
        block_size: tokens per block.
        token_budget: most tokens of a step.
        num_slots: most sequences of a client that run side by side.
    """

    max_len: int
    num_blocks: int
    block_size: int
    token_budget: int
    num_slots: int


def fitted(request: GenerateRequest, room: StepRoom) -> GenerateRequest:
    """Return a request that can end: one that has all blocks never needs another.

    Where the end counts, because of a source, beams or a forced last token, ``max_tokens`` becomes
    what the pool and the context leave.

    Raises:
        ContextLengthError: the prompt and the output, beside the source, exceed the context or the
            pool.
        InvalidRequestError: no step can hold the rows of an input that must not be cut, or all
            beams.
    """
    _check_step(request, room)
    params, prompt_len = request.params, len(request.prompt_ids)
    needed = prompt_len + (1 if params.max_tokens is None else params.max_tokens)
    source_len = num_source_tokens(request.inputs)
    num_blocks = max(0, room.num_blocks - -(-source_len // room.block_size))
    left = num_blocks * room.block_size
    longest = min(room.max_len, left)
    if params.beams is not None:
        longest = min(longest, _longest_beam(prompt_len, params.beams, num_blocks, room.block_size))
    if needed > longest:
        detail = f"However, {needed} tokens were requested, prompt and completion together."
        if source_len:
            detail += f" The source has {source_len}, beside which the KV pool holds {left}."
        if params.beams is not None:
            detail += f" The KV pool holds {longest} for each of {params.beams.width} beams."
        raise ContextLengthError(room.max_len, detail, param="prompt" if source_len else "messages")
    has_end = source_len or params.beams is not None or params.forced_eos_id is not None
    if not has_end or params.max_tokens is not None:
        return request
    return replace(request, params=replace(params, max_tokens=longest - prompt_len))


def _check_step(request: GenerateRequest, room: StepRoom) -> None:
    """Refuse what no step can hold: rows of an input that must not be cut, or all beams."""
    for each in request.inputs:
        if each.span and not each.may_cut and len(each.span) > room.token_budget:
            raise InvalidRequestError(
                f"An input has {len(each.span)} rows, which one step must hold; this server's "
                f"steps have {room.token_budget} tokens (--max-num-batched-tokens).",
                param=each.kind.value,
            )
    beams = request.params.beams
    if beams is not None and request.params.num_sequences > room.num_slots:
        raise InvalidRequestError(
            f"{beams.width} beams run side by side, and this server runs at most "
            f"{room.num_slots} sequences of a client.",
            param="beam_width",
        )


def _longest_beam(prompt_len: int, beams: BeamParams, num_blocks: int, block_size: int) -> int:
    """Return the most tokens of each beam: the pool holds all of them, which share the prompt."""
    shared = prompt_len // block_size
    return (num_blocks + (beams.width - 1) * shared) // beams.width * block_size


def check_room(num_prompts: int, n: int, max_waiting: int) -> None:
    """Refuse what even an empty queue could not hold: it must be admitted as a whole.

    A ``max_waiting`` of 0 is no limit.

    Raises:
        InvalidRequestError: the prompts times ``n`` exceed ``max_waiting``.
    """
    if max_waiting and num_prompts * n > max_waiting:
        raise InvalidRequestError(
            f"{num_prompts * n} samples were requested (prompts times n), and this server's queue "
            f"holds {max_waiting}.",
            param="n" if n > max_waiting else "prompt",
        )


def check_length(prompt_len: int, max_tokens: int | None, max_model_len: int) -> None:
    """Raise ContextLengthError unless the prompt and the requested output fit."""
    num_output = max_tokens if max_tokens is not None else 1
    if prompt_len + num_output <= max_model_len:
        return
    if prompt_len + 1 > max_model_len:
        detail = f"However, your prompt has {prompt_len} tokens. Please shorten it."
    else:
        detail = (
            f"However, you requested {prompt_len + num_output} tokens ({prompt_len} in the prompt, "
            f"{num_output} for the completion). Please shorten the prompt or the completion."
        )
    param = "max_tokens" if prompt_len + 1 <= max_model_len else "messages"
    raise ContextLengthError(max_model_len, detail, param=param)


def _check_min_tokens(min_tokens: int, room: int) -> None:
    """Refuse a least length that the context has no room for; ``room`` is what it leaves."""
    if min_tokens > room:
        raise InvalidRequestError(
            f"min_tokens is {min_tokens}, and the prompt leaves room for {room} tokens.",
            param="min_tokens",
        )


def _check_prompt_logprobs(prompt_len: int, count: int | None, vocab_size: int) -> None:
    """Refuse log-probabilities that would fill the memory: a prompt's are sent all at once."""
    if count is None:
        return
    per_token = vocab_size if count == ALL_TOKENS else count
    if prompt_len * per_token > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs of {per_token} tokens at each of {prompt_len} positions are more "
            f"than the {MAX_PROMPT_LOGPROBS} that one request may have.",
            param="prompt_logprobs",
        )


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{name} has token id {token_id}; this model's ids are 0 to {vocab_size - 1}.",
                param=name,
            )
