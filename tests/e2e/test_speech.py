"""Recordings by OpenAI's client: every form of answer, and a server beside which texts go on."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from openai.types.audio import Transcription, TranscriptionVerbose

from mlx_parallm.client import RequestFailedError, RLClient
from tests.audio_files import clip
from tests.builders.speech_folders import CONFIG, write_scripted_speech, write_speech
from tests.server_process import ServerProcess, serving

#: ``SPEAKS`` hears ``SENTENCE`` in every window, and ``TWICE`` a word besides; ``RANDOM`` and
#: ``ENGLISH`` have random weights.
SPEAKS, TWICE, RANDOM, ENGLISH, TEXT = "speaks", "twice", "random", "english", "mlx-parallm-demo"
SENTENCE, END_S = "Hello --> there.", 2.0
#: ``DRAWN``: settings of a random model, whose likeliest texts are short.
DRAWN: dict[str, Any] = {"temperature": 1.0, "extra_body": {"seed": 3}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("speech")
    folders = {
        SPEAKS: write_scripted_speech(folder / SPEAKS, SENTENCE, end_s=END_S),
        TWICE: write_scripted_speech(folder / TWICE, SENTENCE, end_s=END_S, then=" Again."),
        RANDOM: write_speech(folder / RANDOM),
        ENGLISH: write_speech(folder / ENGLISH, is_english=True),
        TEXT: TEXT,
    }
    with serving(folders, "--max-audio-seconds", "100") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture
async def async_client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as api:
        yield api


def hear(client: openai.OpenAI, seconds: float = 3, *, model: str = SPEAKS, **more: Any) -> Any:
    return client.audio.transcriptions.create(
        file=("speech.wav", clip(seconds)), model=model, **more
    )


def usage_of(seconds: int, num_windows: int, num_text: int, num_output: int) -> dict[str, Any]:
    num_input = 1500 * num_windows + num_text
    return {
        "seconds": seconds,
        "input_tokens": num_input,
        "output_tokens": num_output,
        "total_tokens": num_input + num_output,
        "input_token_details": {"audio_tokens": 1500 * num_windows, "text_tokens": num_text},
    }


def test_json_has_the_text_and_what_it_took(client: openai.OpenAI) -> None:
    answer = hear(client, language="English")
    assert isinstance(answer, Transcription)
    assert answer.text == SENTENCE
    assert answer.usage is not None
    # The prompt has four tokens; the output has the text's, a timestamp and the end.
    expected = {"type": "duration"} | usage_of(3, 1, 4, len(SENTENCE) + 2)
    assert answer.usage.to_dict() == expected


def test_a_language_that_is_detected_costs_a_token(client: openai.OpenAI) -> None:
    usage = hear(client).usage.to_dict()
    assert (usage["input_token_details"]["text_tokens"], usage["output_tokens"]) == (
        4 + 1,
        len(SENTENCE) + 2 + 1,
    )


def test_verbose_json_has_segments(client: openai.OpenAI) -> None:
    answer = hear(client, response_format="verbose_json", timestamp_granularities=["segment"])
    assert isinstance(answer, TranscriptionVerbose)
    assert (answer.text, answer.language, answer.duration) == (SENTENCE, "english", 3.0)
    assert answer.segments is not None
    [segment] = answer.segments
    assert (segment.start, segment.end, segment.text, segment.seek) == (0.0, END_S, SENTENCE, 0)
    assert len(segment.tokens) == len(SENTENCE) + 2
    assert (segment.temperature, segment.avg_logprob) == (0.0, pytest.approx(0, abs=1e-3))
    assert 0 <= segment.no_speech_prob < 0.1


def test_subtitles_have_times_and_no_second_arrow(client: openai.OpenAI) -> None:
    srt = hear(client, 70, response_format="srt")
    assert srt.startswith("1\n00:00:00,000 --> 00:00:02,000\nHello -> there.\n\n2\n00:00:30,000")
    vtt = hear(client, response_format="vtt")
    assert vtt == "WEBVTT\n\n00:00:00.000 --> 00:00:02.000\nHello -> there.\n\n"
    assert hear(client, response_format="text") == f"{SENTENCE}\n"


def test_no_time_is_behind_the_recording(client: openai.OpenAI) -> None:
    # The model hears 2 s of speech in the half second that the second window has.
    answer = hear(client, 30.5, response_format="verbose_json")
    assert answer.duration == 30.5
    times = [(segment.start, segment.end) for segment in answer.segments]
    assert times == [(0.0, END_S), (30.0, 30.5)]
    srt = hear(client, 30.5, response_format="srt")
    assert "00:00:30,000 --> 00:00:30,500" in srt


def test_subtitles_have_no_cue_behind_the_recording(client: openai.OpenAI) -> None:
    answer = hear(client, 1, model=TWICE, response_format="verbose_json")
    times = [(segment.start, segment.end) for segment in answer.segments]
    assert times == [(0.0, 1.0), (1.0, 1.0)]
    vtt = hear(client, 1, model=TWICE, response_format="vtt")
    assert vtt == "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nHello -> there.\n\n"
    assert "Again." in hear(client, 3, model=TWICE, response_format="srt")


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_a_translation_is_english(client: openai.OpenAI) -> None:
    file = ("speech.wav", clip(3))
    assert client.audio.translations.create(file=file, model=SPEAKS).text == SENTENCE
    answer: Any = client.audio.translations.create(
        file=file, model=SPEAKS, response_format="verbose_json"
    )
    assert (answer.task, answer.language) == ("translate", "english")


def test_long_recordings_are_heard_in_windows(client: openai.OpenAI) -> None:
    answer = hear(client, 70, response_format="verbose_json")
    assert [segment.start for segment in answer.segments] == [0.0, 30.0, 60.0]
    assert [segment.seek for segment in answer.segments] == [0, 3000, 6000]
    assert answer.text == SENTENCE * 3
    assert answer.usage.seconds == 70


def test_a_stream_has_an_event_for_each_segment(client: openai.OpenAI) -> None:
    *deltas, done = hear(client, 70, stream=True)
    assert [event.type for event in deltas] == ["transcript.text.delta"] * 3
    assert "".join(event.delta for event in deltas) == done.text == SENTENCE * 3
    assert (done.type, done.usage.type) == ("transcript.text.done", "tokens")


def test_a_stream_has_a_last_line(server: ServerProcess) -> None:
    answer = httpx2.post(
        f"{server.url}/v1/audio/transcriptions",
        files={"file": ("speech.wav", clip(1))},
        data={"model": SPEAKS, "stream": "true"},
    )
    *events, last, end = answer.text.split("\n\n")
    assert [json.loads(event.removeprefix("data: "))["type"] for event in events] == [
        "transcript.text.delta",
        "transcript.text.done",
    ]
    assert (last, end) == ("data: [DONE]", "")


async def test_the_asynchronous_client_gets_the_same(async_client: openai.AsyncOpenAI) -> None:
    create = async_client.audio.transcriptions.create
    file = ("speech.wav", clip(3))
    answer = await create(file=file, model=SPEAKS)
    stream = await create(file=file, model=SPEAKS, stream=True)
    events: list[Any] = [event async for event in stream]
    assert answer.text == events[-1].text == SENTENCE
    assert await create(file=file, model=SPEAKS, response_format="text") == f"{SENTENCE}\n"


def test_logprobs_spell_the_text(client: openai.OpenAI) -> None:
    answer = hear(client, include=["logprobs"])
    spelled = bytes(int(byte) for each in answer.logprobs for byte in each.bytes)
    assert spelled.decode() == answer.text
    *deltas, done = hear(client, 40, include=["logprobs"], stream=True)
    whole = [entry.to_dict() for event in deltas for entry in event.logprobs]
    assert whole == [entry.to_dict() for entry in done.logprobs]
    assert len(whole) == 2 * len(SENTENCE)


def test_a_language_a_prompt_and_a_seed_change_the_text(client: openai.OpenAI) -> None:
    settings: list[dict[str, Any]] = [
        {"language": "de"},
        {"language": "fr"},
        {"language": "de", "prompt": "Names: Ada."},
        {"language": "de", "extra_body": {"seed": 4}},
    ]
    texts = {hear(client, model=RANDOM, **(DRAWN | each)).text for each in settings}
    assert len(texts) == len(settings), texts
    for name in ("German", "DE", "de-AT"):
        assert hear(client, model=RANDOM, language=name, **DRAWN).text in texts


def test_batches_have_recordings_as_data_urls(client: openai.OpenAI) -> None:
    url = f"data:audio/wav;base64,{base64.b64encode(clip(2)).decode()}"
    path = "/v1/audio/transcriptions"
    lines = [
        {"custom_id": "json", "url": path, "body": {"model": SPEAKS, "file_url": url}},
        {"custom_id": "srt", "url": path, "body": {"file_url": url, "response_format": "srt"}},
        {"custom_id": "bad", "url": path, "body": {"model": SPEAKS, "file_url": "https://a.b/c"}},
    ]
    content = "\n".join(json.dumps(line | {"method": "POST"}) for line in lines)
    file = client.files.create(file=("lines.jsonl", content.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint=path,  # pyright: ignore[reportArgumentType]
        completion_window="24h",
    )
    while batch.status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing"), batch
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    answers = {
        entry["custom_id"]: entry["response"]
        for id_ in (batch.output_file_id, batch.error_file_id)
        for entry in map(json.loads, client.files.content(id_).text.splitlines())
    }
    assert answers["json"]["body"]["text"] == SENTENCE
    assert answers["srt"]["body"].startswith("1\n00:00:00,000")
    assert answers["bad"]["status_code"] == 400
    assert answers["bad"]["body"]["error"]["param"] == "file_url"


def test_fields_that_are_not_read_are_named(server: ServerProcess) -> None:
    answer = httpx2.post(
        f"{server.url}/v1/audio/transcriptions",
        files={"file": ("speech.wav", clip(1))},
        data={"model": SPEAKS, "known_speaker_names[]": ["Ada"], "language": ""},
    )
    assert answer.json()["text"] == SENTENCE
    assert answer.headers["x-ignored-fields"] == "known_speaker_names"


def part(header: str, content: bytes) -> bytes:
    """Return a part of a form whose boundary is B."""
    return b"--B\r\n" + header.encode() + b"\r\n\r\n" + content + b"\r\n"


def file_part(
    name: str = '"file"; filename="audio"', kind: str = "application/octet-stream"
) -> bytes:
    header = f"Content-Disposition: form-data; name={name}\r\nContent-Type: {kind}"
    return part(header, clip(1))


def field_part(name: str, text: str) -> bytes:
    return part(f'Content-Disposition: form-data; name="{name}"', text.encode())


#: Forms as clients in several languages write them.
FORMS: dict[str, list[bytes]] = {
    "the file last, without a name's end": [field_part("model", SPEAKS), file_part()],
    "the file first, of another type": [
        file_part(kind="video/webm"),
        field_part("model", SPEAKS),
        field_part("temperature", "0"),
    ],
    "names without quotes": [
        part(
            "Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name=model",
            SPEAKS.encode(),
        ),
        file_part("file; filename=a.wav; filename*=utf-8''a.wav", "audio/wav"),
    ],
    "empty fields": [
        field_part("model", SPEAKS),
        *(
            field_part(name, "")
            for name in (
                *("language", "prompt", "temperature", "response_format"),
                *("timestamp_granularities[]", "include[]"),
            )
        ),
        file_part(),
    ],
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_other_clients_are_read(server: ServerProcess, name: str) -> None:
    answer = httpx2.post(
        f"{server.url}/v1/audio/transcriptions",
        content=b"".join(FORMS[name]) + b"--B--\r\n",
        headers={"content-type": "multipart/form-data; boundary=B"},
    )
    assert answer.json()["text"] == SENTENCE, answer.text


# Other HTTP processes report what they count from time to time.
@pytest.mark.one_engine
def test_seconds_are_counted(server: ServerProcess, client: openai.OpenAI) -> None:
    hear(client, 1)
    before = heard_s(server)
    hear(client, 70)
    assert heard_s(server) == pytest.approx(before + 70)


def heard_s(server: ServerProcess) -> float:
    """Return the seconds that ``SPEAKS`` has heard."""
    line = f'vllm:audio_seconds_total{{model_name="{SPEAKS}"}} '
    lines = httpx2.get(f"{server.url}/metrics").text.splitlines()
    return float(next(each for each in lines if each.startswith(line)).removeprefix(line))


def test_chats_take_no_audio(client: openai.OpenAI) -> None:
    data = base64.b64encode(clip(1)).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    messages: Any = [{"role": "user", "content": [part]}]
    with pytest.raises(openai.BadRequestError, match="audio"):
        client.chat.completions.create(model=TEXT, messages=messages)


async def test_the_typed_client_has_segments(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    path.write_bytes(clip(40))
    async with RLClient(server.url) as typed:
        transcript = await typed.speech.transcribe(path, model=SPEAKS, language="german")
        english = await typed.speech.translate(path.read_bytes(), model=SPEAKS)
        pieces = [piece async for piece in typed.speech.stream_transcript(path, model=SPEAKS)]
        with pytest.raises(RequestFailedError) as refusal:
            await typed.speech.transcribe(b"no audio", model=SPEAKS)
    assert refusal.value.param == "file"
    assert (transcript.text, transcript.language) == (SENTENCE * 2, "german")
    assert (english.text, english.language) == (SENTENCE * 2, "english")
    assert [each.start_s for each in transcript.segments] == [0.0, 30.0]
    assert pieces == [SENTENCE] * 2


async def test_an_adapter_hears_otherwise(server: ServerProcess) -> None:
    random, rank = np.random.RandomState(1), 4
    modules = ("decoder.layers.0.encoder_attn.v_proj", "encoder.layers.0.self_attn.q_proj")
    tensors = {
        f"model.{module}.lora_{side}": random.normal(0, 1, shape).astype(np.float32)
        for module in modules
        for side, shape in (("a", (CONFIG["d_model"], rank)), ("b", (rank, CONFIG["d_model"])))
    }
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": rank, "scale": 2.0}}
    async with RLClient(server.url) as typed:
        await typed.update_adapter("mine", tensors, config, model=RANDOM)

        async def text(model: str) -> str:
            return (
                await typed.speech.transcribe(clip(3), model=model, temperature=1.0, seed=3)
            ).text

        plain, adapted = await text(RANDOM), await text("mine")
        assert plain != adapted
        assert await text(RANDOM) == plain
        await typed.unload_adapter("mine")


async def test_an_abort_leaves_nothing_running(
    server: ServerProcess, async_client: openai.AsyncOpenAI
) -> None:
    # One client leaves a stream after an event, another one before its answer.
    file = ("speech.wav", clip(90))
    stream = await async_client.audio.transcriptions.create(file=file, model=SPEAKS, stream=True)
    assert await anext(aiter(stream))
    await stream.close()
    waiting = asyncio.ensure_future(
        async_client.audio.transcriptions.create(file=file, model=RANDOM)
    )
    async with httpx2.AsyncClient(base_url=server.url) as http:
        while not (await http.get("/load")).json()["num_running"]:
            pass
        waiting.cancel()
        while (await http.get("/load")).json()["server_load"]:
            pass


async def test_a_pause_between_windows_loses_nothing(
    server: ServerProcess, async_client: openai.AsyncOpenAI
) -> None:
    file = ("speech.wav", clip(70))
    hearing = asyncio.ensure_future(
        async_client.audio.transcriptions.create(
            file=file, model=RANDOM, language="en", temperature=1.0, extra_body={"seed": 3}
        )
    )
    async with httpx2.AsyncClient(base_url=server.url, timeout=None) as http:
        while not (await http.get("/load")).json()["num_running"]:
            pass
        # What runs ends; the next window is refused until generation is resumed.
        assert (await http.post("/pause", params={"mode": "wait"})).is_success
        assert (await http.get("/load")).json()["num_running"] == 0
        assert (await http.post("/resume")).is_success
    answer = await hearing
    assert answer.usage is not None
    assert answer.usage.to_dict()["seconds"] == 70


async def test_texts_and_recordings_share_a_server(async_client: openai.AsyncOpenAI) -> None:
    async def chat() -> str | None:
        answer = await async_client.chat.completions.create(
            model=TEXT, messages=[{"role": "user", "content": "hi"}], max_tokens=24, temperature=0
        )
        return answer.choices[0].message.content

    async def transcript() -> str:
        file = ("speech.wav", clip(40))
        return (await async_client.audio.transcriptions.create(file=file, model=SPEAKS)).text

    alone = await chat()
    texts = await asyncio.gather(*(chat() for _ in range(4)), *(transcript() for _ in range(4)))
    assert texts == [alone] * 4 + [SENTENCE * 2] * 4


def test_a_shorter_context_shortens_texts(tmp_path: Path) -> None:
    length = 32
    folder = write_speech(tmp_path / RANDOM)
    with (
        serving({RANDOM: folder}, "--max-model-len", str(length)) as process,
        openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = hear(client, model=RANDOM, language="de", prompt="Ada " * 50, **DRAWN)
    usage = answer.usage.to_dict()
    num_text = usage["input_token_details"]["text_tokens"]
    # Half of the context for the prompt and four tokens that begin the text; its tokens are
    # unlikely, so a second request of one token asks for the probability of no speech.
    assert num_text == length // 2 + 4 + 1
    assert num_text + usage["output_tokens"] <= length + 1 + 1
