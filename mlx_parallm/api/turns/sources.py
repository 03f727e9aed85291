"""Sources of encoder-decoders, what their decoders begin with, and how long their outputs are."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.images.prompt import ImagePrompt
from mlx_parallm.tokenizer.seq2seq.rules import TaskDefaults
from mlx_parallm.tokenizer.seq2seq.tokenizer import Seq2SeqTokenizer
from mlx_parallm.types.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.types.model_input import num_source_tokens, source_of
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.token_limit import TokenLimit

#: ``Side``: a text, or its tokens.
Side = str | Sequence[int]
TRUNCATE = "truncate_prompt_tokens"
DECODER_IDS = "decoder_input_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceForm:
    """Settings for reading a request's sources.

    Attributes:
        src_lang: the language of the sources.
        tgt_lang: the language to translate to.
        task: the task whose prefix is put before texts; None: no prefix.
        truncate: longer sources are cut to so many tokens; -1: to as many as the model reads; None:
            they are refused.
        from_left: True: cutting removes their beginnings.
        add_special_tokens: False: texts get no special tokens.
        param: the body's field of sources.
        cut_by: the body's field that has them cut.
    """

    src_lang: str | None = None
    tgt_lang: str | None = None
    task: str | None = None
    truncate: int | None = None
    from_left: bool = False
    add_special_tokens: bool = True
    param: str = "prompt"
    cut_by: str = TRUNCATE

    def limit(self, most: int) -> SourceLimit:
        """Return the limit of a model that reads ``most`` tokens.

        Raises:
            InvalidRequestError: more tokens are to stay than it reads.
        """
        if self.truncate is not None and not (self.truncate == -1 or 1 <= self.truncate <= most):
            raise InvalidRequestError(
                f"{self.cut_by} is -1 or from 1 to {most}, the longest source.", param=self.cut_by
            )
        kept = most if self.truncate in (None, -1) else self.truncate
        return SourceLimit(
            most=kept,
            cuts=self.truncate is not None,
            from_left=self.from_left,
            name=self.param,
            cut_by=self.cut_by,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLimit(TokenLimit):
    """The most tokens of a source; ``cut_by`` is the body's field that has longer ones cut."""

    cut_by: str = TRUNCATE

    @override
    def refusal(self, count: str, place: int = 0) -> ContextLengthError:
        detail = f"The source has {count} tokens. Shorten it, or set {self.cut_by}."
        return ContextLengthError(self.most or 0, detail, param=self.name, prompt_tokens=count)


def text_side(model: GenerationModel) -> Seq2SeqTokenizer:
    """Return what reads texts as sources; raise InvalidRequestError if nothing does."""
    if model.seq2seq is None:
        raise InvalidRequestError(f"{model.names[0]} reads no texts.", param="model")
    return model.seq2seq


def read_source(
    source: Side,
    model: GenerationModel,
    form: SourceForm,
    decoder: Side | None = None,
    *,
    limit: TokenLimit | None = None,
) -> ImagePrompt:
    """Return a source as an input, with the tokens that the decoder begins with.

    Args:
        source: a text, or tokens that are taken as they are.
        model: an encoder-decoder.
        form: how the request has sources read.
        decoder: a text or tokens that the decoder's output goes on from; a text gets the start
            token, and the language's, before it. None: these tokens alone.
        limit: of the source; None: that of the form.

    Raises:
        InvalidRequestError: the source is empty or has ids of no token, the model does not take
            these languages, or the decoder's ids do not begin as its outputs do.
        ContextLengthError: the source is too long, and the request does not have it cut.
    """
    sides = text_side(model)
    if not source:
        raise InvalidRequestError("The source must not be empty.", param=form.param)
    limit = limit or form.limit(model.info.max_source_len)
    if isinstance(source, str):
        ids = sides.encode_source(
            source,
            src_lang=form.src_lang,
            tgt_lang=form.tgt_lang,
            task=form.task,
            add_special_tokens=form.add_special_tokens,
            limit=limit,
        )
    else:
        info = model.info
        _check_ids(form.param, source, info.source_vocab_size or info.vocab_size)
        ids = sides.cut_source(source, limit)
    if not ids:
        raise InvalidRequestError("The source has no tokens.", param=form.param)
    begin = sides.decoder_prompt(src_lang=form.src_lang, tgt_lang=form.tgt_lang)
    text = decoder if isinstance(decoder, str) else ""
    return ImagePrompt(text, _decoder_ids(decoder, begin, model), (source_of(ids),))


def num_prompt_tokens(prompt: ImagePrompt) -> int:
    """Return the number of a prompt's tokens, on both sides of an encoder-decoder."""
    return len(prompt.token_ids) + num_source_tokens(prompt.inputs)


def _decoder_ids(
    decoder: Side | None, begin: Sequence[int], model: GenerationModel
) -> tuple[int, ...]:
    if decoder is None:
        return tuple(begin)
    if isinstance(decoder, str):
        return (*begin, *text_side(model).encode_target(decoder))
    _check_ids(DECODER_IDS, decoder, model.info.vocab_size)
    common = min(len(begin), len(decoder))
    if common == 0 or list(decoder[:common]) != list(begin[:common]):
        raise InvalidRequestError(
            f"{DECODER_IDS} must begin with {list(begin)}, as this model's outputs do.",
            param=DECODER_IDS,
        )
    # The start token alone is a whole beginning in transformers, which forces the next one.
    return (*decoder, *begin[common:])


def _check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    wrong = next((each for each in token_ids if not 0 <= each < vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"{name} has token id {wrong}; this model's ids are 0 to {vocab_size - 1}.", param=name
        )


def source_params(
    params: SamplingParams,
    model: GenerationModel,
    prompt_len: int,
    *,
    named: Collection[str],
    defaults: TaskDefaults | None = None,
) -> SamplingParams:
    """Return parameters with an encoder-decoder's lengths, forced and banned tokens.

    Args:
        params: those of the request.
        model: whose output they are for.
        prompt_len: the tokens that its decoder begins with.
        named: of "max_tokens" and "min_tokens" those that the request has.
        defaults: how long outputs are otherwise; None: as the model's files say.
    """
    rules = text_side(model).rules
    defaults = defaults or rules.defaults
    most, least = params.max_tokens, params.min_tokens
    room = model.max_model_len - prompt_len
    if "max_tokens" not in named:
        most = defaults.most_tokens(prompt_len)
        most = None if most is None else max(min(most, room), 1)
    if "min_tokens" not in named:
        least = max(min(defaults.least_tokens(prompt_len), room if most is None else most), 0)
    banned = tuple((token_id, -math.inf) for token_id in rules.banned_ids)
    forced = None if params.ignore_eos else next(iter(rules.forced_eos_ids), None)
    beams = params.beams
    if beams is not None:
        beams = replace(beams, renormalizes=defaults.renormalize_logits)
    return replace(
        params,
        beams=beams,
        max_tokens=most,
        min_tokens=least,
        forced_eos_id=forced,
        logit_bias=(*params.logit_bias, *banned),
    )
