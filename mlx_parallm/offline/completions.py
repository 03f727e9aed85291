"""The results of models that generate. Class and field names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_parallm.types.events import ErrorEvent, GenerateEvent, PromptEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.step import TokenLogprob


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One sample of a prompt. Field names are vLLM's.

    Attributes:
        index: its number among the samples of the prompt.
        text: what was generated.
        token_ids: the same as tokens, the end token included.
        logprobs: for each token, if the parameters ask for them.
        finish_reason: "stop" or "length".
        stop_reason: the stop text or token that ended it; None: the end token, or the length.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the sampled tokens' log-probabilities; None unless they were requested."""
        return sum(entry.logprob for entry in self.logprobs) if self.logprobs else None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The result of one prompt. Field names are vLLM's.

    Attributes:
        request_id: unique in the process.
        prompt: the text; None where token ids or messages were passed.
        prompt_token_ids: what the model got.
        outputs: the samples.
        prompt_logprobs: for each prompt token, if the parameters ask for them; None for the first.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0


def empty_output(text: str | None, request: GenerateRequest) -> RequestOutput:
    """Return the output of a request before its first event."""
    return RequestOutput(
        request_id=request.request_id,
        prompt=text,
        prompt_token_ids=request.prompt_ids,
        outputs=[CompletionOutput(index=i) for i in range(request.params.n)],
    )


def apply(event: GenerateEvent, output: RequestOutput) -> bool:
    """Fold an event into its output; return True if that completed the output."""
    match event:
        case PromptEvent():
            output.num_cached_tokens = event.num_cached_tokens
            output.prompt_logprobs = event.prompt_logprobs
            return False
        case ErrorEvent():
            raise event.error
        case TokenEvent():
            sample = output.outputs[event.index]
            sample.text += event.text
            sample.token_ids += event.token_ids
            sample.logprobs += event.logprobs
            if event.finish_reason is not None:
                sample.finish_reason = str(event.finish_reason)
                sample.stop_reason = event.stop_reason
            return all(choice.finish_reason is not None for choice in output.outputs)
