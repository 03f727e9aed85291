"""Recordings in every form of answer, by files, bytes and streams."""

from __future__ import annotations

import io
import wave

import litellm
import pytest
from openai import BadRequestError, OpenAI

SENTENCE = "Hello there."
SECONDS, END_S = 31, 1.0
FORMATS = ["json", "text", "srt", "vtt", "verbose_json"]
SRT = (
    f"1\n00:00:00,000 --> 00:00:01,000\n{SENTENCE}\n\n"
    f"2\n00:00:30,000 --> 00:00:31,000\n{SENTENCE}\n\n"
)
VTT = (
    f"WEBVTT\n\n00:00:00.000 --> 00:00:01.000\n{SENTENCE}\n\n"
    f"00:00:30.000 --> 00:00:31.000\n{SENTENCE}\n\n"
)


def recording() -> io.BytesIO:
    """Return a WAV file of silence, in two windows; the model hears the same in each."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        writer.writeframes(bytes(2 * 16_000 * SECONDS))
    file.seek(0)
    file.name = "speech.wav"
    return file


@pytest.fixture
def client(hearing):
    with OpenAI(base_url=hearing.base_url, api_key=hearing.api_key) as connected:
        yield connected


def check(answer, form):
    """Check what litellm or OpenAI's client makes of an answer."""
    text = answer if isinstance(answer, str) else answer.text
    assert text.strip() == {"srt": SRT, "vtt": VTT}.get(form, 2 * SENTENCE).strip()
    if form == "verbose_json":
        assert (answer.language, answer.duration) == ("english", SECONDS)
        times = [
            (each["start"], each["end"]) if isinstance(each, dict) else (each.start, each.end)
            for each in answer.segments
        ]
        assert times == [(0.0, END_S), (30.0, 30.0 + END_S)]


@pytest.mark.parametrize("form", FORMATS)
def test_openai(client, hearing, form):
    answer = client.audio.transcriptions.create(
        file=recording(), model=hearing.model, response_format=form, language="en"
    )
    check(answer, form)


def test_openai_streams(client, hearing):
    *deltas, done = client.audio.transcriptions.create(
        file=recording(), model=hearing.model, stream=True, include=["logprobs"]
    )
    assert [event.delta for event in deltas] == [SENTENCE] * 2
    assert done.text == 2 * SENTENCE
    assert len(done.logprobs) == len(done.text)
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens


def test_openai_translates(client, hearing):
    answer = client.audio.translations.create(
        file=("speech", recording(), "application/octet-stream"), model=hearing.model
    )
    assert answer.text == 2 * SENTENCE


def test_openai_is_told_what_is_wrong(client, hearing):
    with pytest.raises(BadRequestError) as refusal:
        client.audio.transcriptions.create(file=("a.mp4", b"no recording"), model=hearing.model)
    assert refusal.value.param == "file"


@pytest.mark.parametrize("form", [None, *FORMATS])
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(hearing, provider, form):
    answer = litellm.transcription(
        file=recording(),
        model=f"{provider}/{hearing.model}",
        api_base=hearing.base_url,
        api_key=hearing.api_key,
        temperature=0,
        **({"response_format": form} if form else {}),
    )
    check(answer, form)
