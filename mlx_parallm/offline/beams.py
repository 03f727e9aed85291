"""Parameters and results of ``LLM.beam_search``. Class and field names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.offline.completions import CompletionOutput, RequestOutput
from mlx_parallm.types.beams import BeamParams, EarlyStopping
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Settings of a beam search. Names are vLLM's, and meanings those of transformers.

    Attributes:
        beam_width: number of beams and of results, 1 to 64.
        max_tokens: most tokens of a result; None: up to the context length.
        ignore_eos: go on past the model's end-of-sequence tokens.
        temperature: must be 0.
        length_penalty: above 0 longer results score better; see ``BeamParams``.
        early_stopping: True, False or "never"; see ``BeamParams``.
        min_tokens: no result ends before so many tokens.
        stop_token_ids: tokens that end a result, besides the model's own.
        no_repeat_ngram_size: no run of so many tokens comes twice; 0 is off.
    """

    beam_width: int
    max_tokens: int | None
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    no_repeat_ngram_size: int = 0

    def sampling_params(self) -> SamplingParams:
        """Return the engine's parameters.

        Raises:
            InvalidRequestError: a setting is out of range.
        """
        return SamplingParams(
            n=self.beam_width,
            beams=BeamParams(
                width=self.beam_width,
                length_penalty=self.length_penalty,
                early_stopping=self.early_stopping,
            ),
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            logprobs=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """A result of a beam search.

    Attributes:
        tokens: those of the prompt and of the result, the end token included.
        logprobs: of the result's tokens.
        cum_logprob: the sum of these.
        text: all tokens as text.
        finish_reason: "stop" or "length".
        stop_reason: the stop token that ended it; None: the end token, or the length.
    """

    tokens: list[int]
    logprobs: list[TokenLogprob]
    cum_logprob: float
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """The results of one prompt, best first; empty ones are left out."""

    sequences: list[BeamSearchSequence]


def beam_search_output(output: RequestOutput, tokenizer: Tokenizer) -> BeamSearchOutput:
    """Return vLLM's form of a request's output."""

    def sequence(result: CompletionOutput) -> BeamSearchSequence:
        tokens = [*output.prompt_token_ids, *result.token_ids]
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=result.logprobs,
            cum_logprob=result.cumulative_logprob or 0.0,
            text=tokenizer.decode(tokens, skip_special_tokens=False),
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
        )

    return BeamSearchOutput(sequences=[sequence(each) for each in output.outputs if each.token_ids])
