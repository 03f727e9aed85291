"""Transcribes a recording window by window, as transformers does (``generation_whisper.py``)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlx_parallm.audio.log_mel import FRAMES_PER_S
from mlx_parallm.audio.recording import Recording
from mlx_parallm.audio.windows import (
    WINDOW_FRAMES,
    Segment,
    Thresholds,
    Verdict,
    compression_ratio,
    judged,
    segments_of,
)
from mlx_parallm.tokenizer.speech.rules import SpeechRules
from mlx_parallm.types.model_input import ModelInput
from mlx_parallm.types.request import RAW_LOGPROBS, RENORMALIZED_LOGPROBS, SamplingParams
from mlx_parallm.types.step import TokenLogprob

#: ``TEMPERATURES``: tried one after the other, as long as a text is doubted.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
DEFAULTS = Thresholds()
# UNKNOWN: a probability of no speech.
UNKNOWN = math.nan


@dataclass(frozen=True, slots=True)
class Heard:
    """The output of one request.

    Attributes:
        token_ids: its tokens, the end token included if the model chose it.
        logprobs: of each of them.
        num_prompt_tokens: the decoder's tokens before them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    num_prompt_tokens: int


class Ask(Protocol):
    """Asks the model."""

    async def __call__(
        self, prompt_ids: Sequence[int], source: ModelInput, params: SamplingParams, /
    ) -> Heard:
        """Return what the model makes of a source behind a prompt."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A wish about a recording.

    Attributes:
        name: "transcribe" or "translate".
        language: its code; None: it is detected.
        has_timestamps: whether segments have times; long recordings always have.
        previous: tokens of a text that is read before each window.
        temperatures: tried one after the other.
        thresholds: signs of a text that is not what was said.
        seed: of draws; None for any.
        wants_no_speech: whether windows have the probability of no speech.
    """

    name: str = "transcribe"
    language: str | None = None
    has_timestamps: bool = False
    previous: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = TEMPERATURES
    thresholds: Thresholds = DEFAULTS
    seed: int | None = None
    wants_no_speech: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The texts of a window.

    Attributes:
        segments: in order; none if nobody speaks.
        text_ids: the tokens of the segments' texts.
        logprobs: of these tokens.
        first_frame: where it begins.
        temperature: that its text was chosen at.
        mean_logprob: of its tokens.
        compression_ratio: see ``windows.compression_ratio``.
        no_speech: the probability that the window has no speech; NaN if it was not asked for.
    """

    segments: Sequence[Segment]
    text_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    first_frame: int
    temperature: float
    mean_logprob: float
    compression_ratio: float
    no_speech: float


@dataclass(frozen=True, slots=True)
class Attempt:
    """A window's text at a temperature.

    Attributes:
        heard: its tokens.
        temperature: see ``Window``.
        mean_logprob: likewise.
        compression_ratio: likewise.
        no_speech: likewise.
        verdict: whether it is to be chosen anew, or there is none.
    """

    heard: Heard
    temperature: float
    mean_logprob: float
    compression_ratio: float
    no_speech: float
    verdict: Verdict

    def window(self, segments: Sequence[Segment], first_frame: int, end_id: int) -> Window:
        """Return the window that has this text; text has no ids from ``end_id`` on."""
        pairs = zip(self.heard.token_ids, self.heard.logprobs, strict=True)
        texts = [(token_id, logprob) for token_id, logprob in pairs if token_id < end_id]
        # What is behind the last segment is heard again.
        num_kept = sum(each < end_id for segment in segments for each in segment.token_ids)
        del texts[num_kept:]
        return Window(
            segments=segments,
            text_ids=tuple(token_id for token_id, _ in texts),
            logprobs=tuple(logprob for _, logprob in texts),
            first_frame=first_frame,
            temperature=self.temperature,
            mean_logprob=self.mean_logprob,
            compression_ratio=self.compression_ratio,
            no_speech=self.no_speech,
        )


@dataclass(slots=True)
class Counts:
    """The tokens of all requests of a recording."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    num_windows: int = 0


class Transcriber:
    """One recording.

    Attributes:
        language: its code, once it is known.
        counts: tokens so far.
    """

    def __init__(self, rules: SpeechRules, recording: Recording, task: Task, ask: Ask) -> None:
        self.language = task.language if rules.languages else "en"
        self.counts = Counts()
        self._rules = rules
        self._recording = recording
        self._task = dataclasses.replace(
            task, has_timestamps=task.has_timestamps or recording.is_long
        )
        self._ask = ask

    async def windows(self) -> AsyncGenerator[Window]:
        """Yield windows as their texts are known."""
        first = 0
        while first < self._recording.num_frames:
            source = self._recording.window(first)
            length = min(WINDOW_FRAMES, self._recording.num_frames - first)
            no_speech = UNKNOWN
            if self.language is None:
                no_speech = await self._listen(source)
            window, offset = await self._window(source, first, length, no_speech)
            self.counts.num_windows += 1
            yield window
            # A window that ends where it begins would be heard for ever.
            first += offset or length

    async def _listen(self, source: ModelInput) -> float:
        """Return the probability of no speech; set the language if it is not known."""
        rules, is_open = self._rules, self.language is None
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=0,
            logprobs_mode=RAW_LOGPROBS,
            allowed_token_ids=tuple(rules.languages.values()) if is_open else None,
            logprob_token_ids=() if rules.no_speech_id is None else (rules.no_speech_id,),
        )
        heard = await self._heard(
            rules.prompt(None, self._task.name, has_timestamps=True), source, params
        )
        if is_open:
            codes = {token_id: code for code, token_id in rules.languages.items()}
            self.language = codes[heard.token_ids[0]]
        top = heard.logprobs[0].top
        return math.exp(top[0][1]) if params.logprob_token_ids and top else 0.0

    async def _window(
        self, source: ModelInput, first: int, length: int, no_speech: float
    ) -> tuple[Window, int]:
        """Return a window's texts, and by how many frames the next window is later."""
        *doubtful, last = self._task.temperatures
        for temperature in doubtful:
            attempt = await self._attempt(source, temperature, no_speech)
            if not attempt.verdict.is_doubted:
                break
            # Nobody speaks, or somebody does, whatever the temperature.
            no_speech = attempt.no_speech
        else:
            attempt = await self._attempt(source, last, no_speech)
        segments, offset = list[Segment](), length
        if not attempt.verdict.is_silent:
            segments, offset = self._segments(attempt.heard, first, length)
        return attempt.window(segments, first, self._rules.end_id), offset

    async def _attempt(self, source: ModelInput, temperature: float, no_speech: float) -> Attempt:
        """Return a window's text at a temperature, and what is to be thought of it."""
        task, rules = self._task, self._rules
        prompt = rules.prompt(
            self.language, task.name, has_timestamps=task.has_timestamps, previous=task.previous
        )
        heard = await self._heard(prompt, source, self._params(len(prompt), temperature))
        ratio = compression_ratio(heard.token_ids, rules.vocab_size)
        mean = sum(each.logprob for each in heard.logprobs) / max(1, len(heard.logprobs))
        limit = task.thresholds.logprob
        is_guess = limit is not None and mean < limit
        if math.isnan(no_speech) and (is_guess or task.wants_no_speech):
            no_speech = await self._listen(source)
        verdict = judged(task.thresholds, ratio=ratio, mean_logprob=mean, no_speech=no_speech)
        return Attempt(heard, temperature, mean, ratio, no_speech, verdict)

    def _segments(self, heard: Heard, first: int, length: int) -> tuple[list[Segment], int]:
        """See ``segments_of``; without timestamps a window is one segment."""
        rules = self._rules
        if self._task.has_timestamps:
            token_ids = [each for each in heard.token_ids if each != rules.end_id]
            return segments_of(token_ids, first, length, rules.timestamp_begin)
        texts = tuple(each for each in heard.token_ids if each < rules.end_id)
        end = (first + length) / FRAMES_PER_S
        return [Segment(first / FRAMES_PER_S, end, texts)], length

    def _params(self, prompt_len: int, temperature: float) -> SamplingParams:
        rules = self._rules
        return SamplingParams(
            max_tokens=max(1, rules.max_length - prompt_len),
            temperature=temperature,
            seed=self._task.seed,
            logprobs=0,
            logprobs_mode=RENORMALIZED_LOGPROBS,
            logit_bias=tuple((token_id, -math.inf) for token_id in rules.banned_ids),
            begin_banned_ids=rules.begin_banned_ids,
            timestamps=rules.timestamps if self._task.has_timestamps else None,
            skip_special_tokens=False,
        )

    async def _heard(
        self, prompt: Sequence[int], source: ModelInput, params: SamplingParams
    ) -> Heard:
        heard = await self._ask(prompt, source, params)
        self.counts.prompt_tokens += heard.num_prompt_tokens
        self.counts.output_tokens += len(heard.token_ids)
        return heard
