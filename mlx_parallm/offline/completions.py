"""The results of models that generate. Class and field names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from queue import SimpleQueue

from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.events import ErrorEvent, GenerateEvent, PromptEvent, TokenEvent
from mlx_parallm.types.model_input import source_ids, sources_of
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
        prompt_token_ids: what the model got; of an encoder-decoder, what its decoder began with.
        encoder_prompt_token_ids: the source of an encoder-decoder; None for other models.
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
    encoder_prompt_token_ids: tuple[int, ...] | None = None


#: ``Ended``: the output of a request, or what it failed with.
Ended = RequestOutput | ParallmError


class OutputReader:
    """Makes an output of a request's events. Implements ``EventReader``.

    Attributes:
        request: whose events these are.
        num_samples: see ``EventReader``.
        is_complete: see ``EventReader``.
        has_one_event: False: its thread waits for nothing else, and a refusal is raised early.
        is_overfull: False, since events are not kept.
    """

    has_one_event = False
    is_overfull = False

    def __init__(
        self, text: str | None, request: GenerateRequest, ended: SimpleQueue[Ended]
    ) -> None:
        """``text`` is the prompt, if it came as one; ``ended`` gets the output, or the error."""
        self.request = request
        self.num_samples = request.params.n
        self.is_complete = False
        self._ended = ended
        self._num_open = self.num_samples
        self._output = RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=request.prompt_ids,
            encoder_prompt_token_ids=next(map(source_ids, sources_of(request.inputs)), None),
            outputs=[CompletionOutput(index=i) for i in range(request.params.n)],
        )

    def put(self, event: GenerateEvent) -> None:
        """See ``EventReader``."""
        if self.is_complete:
            return
        match event:
            case PromptEvent():
                self._output.num_cached_tokens = event.num_cached_tokens
                self._output.prompt_logprobs = event.prompt_logprobs
            case ErrorEvent():
                self._end(event.error)
            case TokenEvent():
                sample = self._output.outputs[event.index]
                sample.text += event.text
                sample.token_ids += event.token_ids
                sample.logprobs += event.logprobs
                if event.finish_reason is not None:
                    sample.finish_reason = str(event.finish_reason)
                    sample.stop_reason = event.stop_reason
                    self._num_open -= 1
                if not self._num_open:
                    self._end(self._output)

    def fail(self, error: ParallmError) -> None:
        """See ``EventReader``."""
        self.put(ErrorEvent(request_id=self.request.request_id, error=error))

    def _end(self, result: Ended) -> None:
        self.is_complete = True
        self._ended.put(result)
