"""Fill-in-the-middle prompts: what a model saw in training between a text before and one after.

Sources: Bavarian et al. 2022 (arXiv:2207.14255) for the method and the two orders. By row: the
README of Qwen2.5-Coder and the model card of CodeGemma (arXiv:2406.11409); StarCoder
(arXiv:2305.06161), StarCoder2 (arXiv:2402.19173) and the cards of Granite code models; SantaCoder
(arXiv:2301.03988); Code Llama (arXiv:2308.12950); DeepSeek-Coder (arXiv:2401.14196); Codestral, as
mistral-common encodes it; CodeGeeX4 and GLM-4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_parallm.api.turns.continuation import continuation_ids
from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import SamplingParams

# Stands before a suffix while it is tokenised: a character that joins with nothing.
ANCHOR = "\u263a"


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The tokens around the parts, by their text in the vocabulary.

    Attributes:
        prefix: before the text before.
        suffix: before the text after.
        middle: before the answer; None where the answer follows the last part.
        ends: what may end the answer, besides the model's own end of sequence.
        suffix_first: whether the text after comes first.
    """

    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()
    suffix_first: bool = False

    def is_in(self, tokenizer: Tokenizer) -> bool:
        """True if each of the tokens is one."""
        marks = (self.prefix, self.suffix, self.middle)
        return all(tokenizer.token_id(mark) is not None for mark in marks if mark is not None)


FORMATS = (
    InfillFormat(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    InfillFormat(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<fim_pad>", "<file_sep>", "<repo_name>", "<|endoftext|>"),
    ),
    InfillFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),
    InfillFormat("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",)),
    InfillFormat(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),
    InfillFormat("[PREFIX]", "[SUFFIX]", None, suffix_first=True),
    InfillFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ("<|endoftext|>",)),
)


def infill_format(tokenizer: Tokenizer) -> InfillFormat:
    """Return how a model of this tokenizer fills in.

    Raises:
        InvalidRequestError: it has the tokens of no known format.
    """
    for form in FORMATS:
        if form.is_in(tokenizer):
            return form
    raise InvalidRequestError(
        "This model has no fill-in-the-middle tokens.",
        param="suffix",
        code="unsupported_parameter",
    )


def infill_ids(
    prefix: str, suffix: str, tokenizer: Tokenizer, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """Return the prompt whose continuation stands between the two texts.

    Raises:
        InvalidRequestError: see ``infill_format``.
    """
    form = infill_format(tokenizer)
    before = _mark(form.prefix, tokenizer) + _ids(prefix, tokenizer)
    after = _mark(form.suffix, tokenizer) + continuation_ids(tokenizer, ANCHOR, suffix)
    parts = after + before if form.suffix_first else before + after
    begin = tuple(tokenizer.encode("", add_special_tokens=add_special_tokens))
    return begin + parts + (_mark(form.middle, tokenizer) if form.middle else ())


def with_infill_ends(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return the parameters, with the tokens that end what is filled in."""
    if params.ignore_eos:
        return params
    ids = (tokenizer.token_id(mark) for mark in infill_format(tokenizer).ends)
    ends = tuple(
        token_id for token_id in ids if token_id is not None and token_id not in tokenizer.eos_ids
    )
    return replace(params, stop_token_ids=params.stop_token_ids + ends)


def _mark(mark: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    token_id = tokenizer.token_id(mark)
    return () if token_id is None else (token_id,)


def _ids(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
