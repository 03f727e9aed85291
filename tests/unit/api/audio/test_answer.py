"""Transcripts as subtitles, events and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.api.audio.answer import Transcript
from mlx_parallm.api.audio.schema import SpeechRequest
from mlx_parallm.audio.transcriber import Counts, Window
from mlx_parallm.audio.windows import Segment
from mlx_parallm.types.step import TokenLogprob
from tests.fakes import ByteTokenizer

END_ID = 256


def segment(start: float, end: float, text: str) -> Segment:
    return Segment(start, end, (END_ID + 1, *text.encode(), END_ID + 2))


def window(*segments: Segment, first_frame: int = 0) -> Window:
    ids = [each for part in segments for each in part.token_ids if each < END_ID]
    return Window(
        segments=segments,
        text_ids=tuple(ids),
        logprobs=tuple(TokenLogprob(each, -each / 8) for each in ids),
        first_frame=first_frame,
        temperature=0.2,
        mean_logprob=-0.5,
        compression_ratio=1.0,
        no_speech=0.1,
    )


def transcript(task: str = "transcribe", **fields: Any) -> Transcript:
    model: Any = SimpleNamespace(tokenizer=ByteTokenizer(), speech=SimpleNamespace(end_id=END_ID))
    counts = Counts(prompt_tokens=4, output_tokens=7, num_windows=2)
    transcriber: Any = SimpleNamespace(language="de", counts=counts)
    return Transcript(SpeechRequest(**fields), task, model, transcriber, 3665.5)


def answer(windows: Sequence[Window], **fields: Any) -> str:
    whole = transcript(**fields)
    for each in windows:
        whole.add(each)
    return bytes(whole.response().body).decode()


LATE = window(
    segment(3661.5, 3662.999, " a-->b\n\n c"),
    segment(3663.0, 3664.0, " "),
    segment(3664.0, 3665.25, " d"),
    first_frame=366_150,
)


def test_subtitles_leave_out_what_would_end_a_cue() -> None:
    assert answer([LATE], response_format="srt") == (
        "1\n01:01:01,500 --> 01:01:02,999\na->b\nc\n\n2\n01:01:04,000 --> 01:01:05,250\nd\n\n"
    )
    assert answer([LATE], response_format="vtt") == (
        "WEBVTT\n\n01:01:01.500 --> 01:01:02.999\na->b\nc\n\n01:01:04.000 --> 01:01:05.250\nd\n\n"
    )
    assert answer([], response_format="srt") == ""
    assert answer([], response_format="vtt") == "WEBVTT\n\n"


def test_deltas_and_their_logprobs_make_up_the_text() -> None:
    whole = transcript(include=["logprobs"], stream=True)
    events = [event for each in (window(segment(0, 1, " é")), LATE) for event in whole.add(each)]
    done = whole.done()
    assert "".join(event["delta"] for event in events) == done["text"] == "é a-->b\n\n c d"
    entries = [entry for event in events for entry in event["logprobs"]]
    assert entries == done["logprobs"]
    spelled = bytes(byte for entry in entries for byte in entry["bytes"])
    # The space before the first word is the model's, and no part of the answer.
    assert spelled.decode().removeprefix(" ") == done["text"]
    assert all(entry["logprob"] == -entry["bytes"][0] / 8 for entry in entries)


def test_verbose_json_has_the_windows_of_segments() -> None:
    body = json.loads(answer([LATE], response_format="verbose_json"))
    assert [each["id"] for each in body["segments"]] == [0, 1]
    assert body["segments"][1] | {"tokens": []} == {
        "id": 1,
        "seek": 366_150,
        "start": 3664.0,
        "end": 3665.25,
        "text": " d",
        "tokens": [],
        "temperature": 0.2,
        "avg_logprob": -0.5,
        "compression_ratio": pytest.approx(13 / 21),
        "no_speech_prob": 0.1,
    }
    assert (body["language"], body["duration"]) == ("german", 3665.5)
    assert body["usage"] == {
        "type": "duration",
        "seconds": 3666,
        "input_tokens": 3004,
        "output_tokens": 7,
        "total_tokens": 3011,
        "input_token_details": {"audio_tokens": 3000, "text_tokens": 4},
    }


def test_translations_are_english() -> None:
    whole = transcript("translate", response_format="verbose_json")
    body = json.loads(bytes(whole.response().body))
    assert (body["task"], body["language"], body["text"]) == ("translate", "english", "")
