"""Recordings give the segments of transformers' ``generate``: tests/golden/speech.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.audio.recording import recorded
from mlx_parallm.audio.transcriber import Heard, Task, Transcriber
from mlx_parallm.audio.windows import Thresholds
from mlx_parallm.config import ModelConfig
from mlx_parallm.models.seq2seq.dense_cache import set_source
from mlx_parallm.tokenizer.speech.rules import SpeechRules
from mlx_parallm.types.model_input import LOG_MEL, ModelInput
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec, TokenLogprob
from mlx_parallm.worker.sampling.sampler import Sampler
from mlx_parallm.worker.weights.loader import load_model
from tests.encoder_folders import write_golden
from tests.golden_sources import golden_samples

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "speech.json").read_text(encoding="utf-8")
)["long"]
FIELDS: dict[str, Any] = GOLDEN["generation"]
RULES = SpeechRules(
    start_id=FIELDS["decoder_start_token_id"],
    end_id=FIELDS["eos_token_id"],
    no_timestamps_id=FIELDS["no_timestamps_token_id"],
    no_speech_id=FIELDS["no_timestamps_token_id"] - 1,
    previous_id=FIELDS["prev_sot_token_id"],
    languages={name.strip("<|>"): number for name, number in FIELDS["lang_to_id"].items()},
    tasks=FIELDS["task_to_id"],
    banned_ids=tuple(FIELDS["suppress_tokens"]),
    begin_banned_ids=tuple(FIELDS["begin_suppress_tokens"]),
    max_initial=FIELDS["max_initial_timestamp_index"],
    vocab_size=GOLDEN["config"]["vocab_size"],
    max_length=FIELDS["max_length"],
)


class DirectModel:
    """Answers requests one token after the other, without an engine."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._sampler = Sampler()
        self.num_asked = 0

    async def ask(
        self, prompt_ids: Sequence[int], source: ModelInput, params: SamplingParams
    ) -> Heard:
        self.num_asked += 1
        features = source.arrays[LOG_MEL]
        rows = np.frombuffer(features.data, np.float32).reshape(features.shape)
        caches = self._model.make_cache()
        set_source(self._model, caches, {LOG_MEL: mx.array(rows)})
        output: list[int] = []
        logprobs: list[TokenLogprob] = []
        new = list(prompt_ids)
        while len(output) < (params.max_tokens or 0):
            logits = self._model(mx.array([new]), caches)[:, -1]
            banned = params.begin_banned_ids if not output else ()
            spec = SampleSpec(
                params=params,
                seed=params.seed or 0,
                position=len(output),
                prompt_ids=prompt_ids,
                output_ids=output,
                banned_ids=banned,
            )
            (sampled,) = self._sampler(logits, [spec]).to_python([0])
            assert sampled.logprob is not None
            output.append(sampled.token_id)
            logprobs.append(sampled.logprob)
            new = output[-1:]
            if sampled.token_id == RULES.end_id and not params.ignore_eos:
                break
        return Heard(tuple(output), tuple(logprobs), len(prompt_ids))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_golden(tmp_path_factory.mktemp("speech"), GOLDEN)
    return load_model(ModelConfig(dtype="float32"), folder).model


CASES = [
    case if case["seed"] == 1 else pytest.param(case, marks=pytest.mark.slow)
    for case in GOLDEN["cases"]
]


@pytest.mark.parametrize("case", CASES)
async def test_long_recordings_have_the_segments_of_transformers(
    case: dict[str, Any], model: Any
) -> None:
    recording = recorded(golden_samples(case["seed"], case["seconds"]), 80)
    direct = DirectModel(model)
    task = Task(temperatures=(0.0,), thresholds=Thresholds(no_speech=case["no_speech"]))
    transcriber = Transcriber(RULES, recording, task, direct.ask)
    windows = [window async for window in transcriber.windows()]
    assert RULES.languages[transcriber.language or ""] == case["language"]
    segments = [segment for window in windows for segment in window.segments]
    assert [list(each.token_ids) for each in segments] == [row[2] for row in case["segments"]]
    for own, (start, end, _) in zip(segments, case["segments"], strict=True):
        assert (own.start, own.end) == pytest.approx((start, end), abs=1e-6)
    # What is heard again in the next window is no text of this one.
    for window in windows:
        kept = [each for segment in window.segments for each in segment.token_ids]
        assert list(window.text_ids) == [each for each in kept if each < RULES.end_id]
        assert len(window.logprobs) == len(window.text_ids)


async def test_a_short_recording_without_timestamps_is_one_window(model: Any) -> None:
    recording = recorded(golden_samples(9, 3.0), 80)
    direct = DirectModel(model)
    task = Task(language="de", temperatures=(0.0,), thresholds=Thresholds(logprob=None))
    transcriber = Transcriber(RULES, recording, task, direct.ask)
    (window,) = [each async for each in transcriber.windows()]
    (segment,) = window.segments
    assert segment.start == 0.0
    assert segment.end == 3.0
    assert direct.num_asked == 1
    assert segment.token_ids == window.text_ids
    assert all(token_id < RULES.end_id for token_id in window.text_ids)
    assert transcriber.counts.prompt_tokens == 4


async def test_doubted_texts_are_chosen_anew_and_silence_has_none(model: Any) -> None:
    recording = recorded(golden_samples(9, 3.0), 80)
    direct = DirectModel(model)
    # Everything is a guess.
    doubts = Thresholds(compression_ratio=None, logprob=0.0, no_speech=1.0)
    task = Task(language="de", temperatures=(0.0, 0.5, 1.0), thresholds=doubts, seed=3)
    windows = [each async for each in Transcriber(RULES, recording, task, direct.ask).windows()]
    assert windows[0].temperature == 1.0
    # Three texts, and once whether somebody speaks.
    assert direct.num_asked == 4
    silent = Thresholds(compression_ratio=None, logprob=0.0, no_speech=0.0)
    task = Task(language="de", temperatures=(0.0, 0.5), thresholds=silent)
    (window,) = [each async for each in Transcriber(RULES, recording, task, direct.ask).windows()]
    assert not window.segments
    assert window.temperature == 0.0
