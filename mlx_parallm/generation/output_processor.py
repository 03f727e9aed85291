"""Turns the tokens of a step into events with text, and finds stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mlx_parallm.generation.model import IncrementalDetokenizer, Tokenizer
from mlx_parallm.generation.scheduler.updates import SequenceUpdate
from mlx_parallm.generation.stop_texts import StopTextMatcher, StopTexts
from mlx_parallm.types.errors import StepError
from mlx_parallm.types.events import ErrorEvent, FinishReason, GenerateEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams


@dataclass(slots=True)
class ProcessedStep:
    """The meaning of a step for its clients and for the scheduler.

    Attributes:
        events: in the order of the updates.
        stopped: ``(request_id, index)`` of samples that ended here while the scheduler still runs
            them, by a stop string or because another sample of the request failed.
    """

    events: list[GenerateEvent] = field(default_factory=list[GenerateEvent])
    stopped: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])


@dataclass(slots=True)
class _Sample:
    """The text state of one sample.

    Attributes:
        detokenizer: turns its tokens into text.
        matcher: looks for its stop strings.
        has_stops: False if it has none.
        num_tokens: its tokens so far.
    """

    detokenizer: IncrementalDetokenizer
    matcher: StopTextMatcher
    has_stops: bool
    num_tokens: int = 0


@dataclass(slots=True)
class _Request:
    """A request's samples that have not ended.

    Attributes:
        params: of all of them.
        tokenizer: of the model.
        stop: their stop strings.
        open: their indices.
        samples: the text state of those that have begun, by index.
    """

    params: SamplingParams
    tokenizer: Tokenizer
    stop: StopTexts
    open: dict[int, None]
    samples: dict[int, _Sample] = field(default_factory=dict[int, _Sample])

    def sample(self, index: int) -> _Sample:
        """Return the text state of an open sample."""
        if index not in self.samples:
            detokenizer = self.tokenizer.detokenizer(
                skip_special_tokens=self.params.skip_special_tokens,
                shown=self.params.shown_token_ids,
                hidden=self.params.hidden_token_ids,
            )
            self.samples[index] = _Sample(detokenizer, self.stop.matcher(), self.stop.has_any)
        return self.samples[index]

    def close(self, index: int) -> None:
        """Forget a sample; unknown ones are ignored."""
        self.open.pop(index, None)
        self.samples.pop(index, None)


class OutputProcessor:
    """Detokenizes every sample and looks for its stop strings.

    A request is forgotten when its last sample ended or failed; updates of samples that ended are
    ignored, since the step in flight when a stop string was met still brings one.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def add(self, request: GenerateRequest, tokenizer: Tokenizer) -> None:
        """Begin a request; before its first update."""
        params = request.params
        stop = StopTexts(
            params.stop, params.stop_regex, include_in_output=params.include_stop_str_in_output
        )
        open_samples = dict.fromkeys(range(params.n))
        self._requests[request.request_id] = _Request(params, tokenizer, stop, open_samples)

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._requests.pop(request_id, None)

    def end(self, request_id: str) -> list[GenerateEvent]:
        """Forget a request; the last event of each sample, with the text that was held back."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        return [
            TokenEvent(
                request_id=request_id,
                index=index,
                token_ids=(),
                text=_advance(request.sample(index), request.params, None, is_last=True),
                finish_reason=FinishReason.ABORT,
            )
            for index in request.open
        ]

    def process(self, updates: Sequence[SequenceUpdate]) -> ProcessedStep:
        """Events of one step: one per token of a sample, and of each its first error only."""
        step = ProcessedStep()
        failed: dict[str, _Request] = {}
        for update in updates:
            request = self._requests.get(update.request_id) or failed.get(update.request_id)
            if request is None:
                continue
            if update.error is not None or update.request_id in failed:
                self._fail(update, request, failed, step)
            else:
                self._update(update, request, step)
        for request_id, request in failed.items():
            step.stopped.extend((request_id, index) for index in request.open)
        return step

    def _fail(
        self,
        update: SequenceUpdate,
        request: _Request,
        failed: dict[str, _Request],
        step: ProcessedStep,
    ) -> None:
        """End the whole request at its first error.

        What remains in ``request.open`` is what the scheduler has not ended itself.
        """
        if update.request_id not in failed:
            error = StepError(update.error)
            step.events.append(ErrorEvent(request_id=update.request_id, error=error))
            failed[update.request_id] = request
            self.remove(update.request_id)
        if update.error is not None or update.finish_reason is not None:
            request.close(update.index)

    def _update(self, update: SequenceUpdate, request: _Request, step: ProcessedStep) -> None:
        if update.prompt is not None:
            step.events.append(update.prompt)
        has_news = update.token is not None or update.finish_reason is not None
        if update.index not in request.open or not has_news:
            return
        sample = request.samples.get(update.index) or request.sample(update.index)
        make_event = _beam_event if update.earlier else _token_event
        if not sample.has_stops and update.finish_reason is None and not update.earlier:
            make_event = _plain_event
        event = make_event(update, sample, request.params)
        step.events.append(event)
        if event.finish_reason is None:
            return
        if update.finish_reason is None:
            step.stopped.append((update.request_id, update.index))
        request.close(update.index)
        if not request.open:
            self.remove(update.request_id)


def _plain_event(update: SequenceUpdate, sample: _Sample, params: SamplingParams) -> TokenEvent:
    """Return the event of a token that ends nothing: ``_token_event``, in short."""
    token = update.token
    if token is None or token.logprob is not None or update.is_forced_end:
        return _token_event(update, sample, params)
    sample.num_tokens += 1
    token_id = token.token_id
    return TokenEvent(
        request_id=update.request_id,
        index=update.index,
        token_ids=(token_id,),
        text=sample.detokenizer.add(token_id),
        version=update.version,
    )


def _beam_event(update: SequenceUpdate, sample: _Sample, params: SamplingParams) -> TokenEvent:
    """Return one event for several tokens; a beam has no stop strings."""
    earlier = update.earlier
    text = "".join(_advance(sample, params, each.token_id, is_last=False) for each in earlier)
    event = _token_event(update, sample, params)
    return replace(
        event,
        token_ids=(*(each.token_id for each in earlier), *event.token_ids),
        text=text + event.text,
        logprobs=(*(each.logprob for each in earlier if each.logprob), *event.logprobs),
    )


def _token_event(update: SequenceUpdate, sample: _Sample, params: SamplingParams) -> TokenEvent:
    token, shown = update.token, None
    if token is not None:
        sample.num_tokens += 1
        shown = token.token_id if _has_text(update, params) else None
    text = _advance(sample, params, shown, is_last=update.finish_reason is not None)
    finish_reason: FinishReason | None = update.finish_reason
    stop_reason: int | str | None = update.stop_reason
    if sample.matcher.matched is not None:
        finish_reason, stop_reason = FinishReason.STOP, sample.matcher.matched
    return TokenEvent(
        request_id=update.request_id,
        index=update.index,
        token_ids=() if token is None else (token.token_id,),
        text=text,
        logprobs=() if token is None or token.logprob is None else (token.logprob,),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        version=update.version,
    )


def _advance(
    sample: _Sample, params: SamplingParams, token_id: int | None, *, is_last: bool
) -> str:
    """Add a token, if there is one, and return the text that can be emitted now.

    ``is_last``: no token follows, so that no text is held back.
    """
    text = "" if token_id is None else sample.detokenizer.add(token_id)
    if is_last:
        text += sample.detokenizer.flush()
    # Text of the first min_tokens tokens is never part of a stop string.
    if sample.num_tokens > params.min_tokens:
        text = sample.matcher.add(text)
    if is_last and sample.matcher.matched is None:
        text += sample.matcher.flush()
    return text


def _has_text(update: SequenceUpdate, params: SamplingParams) -> bool:
    """Return True if the token shows in the text: all do but those that end the sample.

    A stop token the caller named shows when stop strings do; the model's own end never does, nor
    one that the limit forced.
    """
    if update.finish_reason is not FinishReason.STOP:
        return not update.is_forced_end
    return params.include_stop_str_in_output and update.stop_reason is not None
