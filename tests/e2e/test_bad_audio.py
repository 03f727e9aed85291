"""Bad recordings and fields are refused by name, and take little memory."""

from __future__ import annotations

import base64
import io
import re
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.audio_files import clip, coded, coded_samples, noise, wav
from tests.builders.speech_folders import write_scripted_speech, write_speech
from tests.server_process import ServerProcess, serving

MEMORY = Path("/proc/self/clear_refs")
# MOST_KIB: that bad recordings may take beside good ones.
MOST_KIB = 50 * 1024
SPEAKS, ENGLISH, TEXT = "speaks", "english", "mlx-parallm-demo"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def zip_file() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("speech.wav", clip(1))
    return data.getvalue()


def flac_of_10_hours() -> bytes:
    """Return a FLAC file of some samples that announces 10 hours of them."""
    data = bytearray(next(each.file for name, each in coded_samples().items() if "flac" in name))
    # The rate has 20 bits at byte 18, and the samples 36 bits that end at byte 26.
    rate = int.from_bytes(data[18:21], "big") >> 4
    field = int.from_bytes(data[21:26], "big") >> 36 << 36
    data[21:26] = (field | rate * 36_000).to_bytes(5, "big")
    return bytes(data)


GOOD = clip(3)
STEREO = coded(np.repeat(noise(0.1)[:, None], 32, axis=1), "<i2")
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no audio file"),
    "truncated": (GOOD[: len(GOOD) // 3], "truncated"),
    "header": (GOOD[:30], "WAV"),
    "no samples": (wav(b""), "no samples"),
    "10 hours": (flac_of_10_hours(), "lasts 36000"),
    "384 kHz": (wav(bytes(2000), rate=384_000), "384000 samples per second"),
    "32 channels": (wav(STEREO, channels=32), "32 channels"),
    "zip": (zip_file(), "a ZIP archive"),
    "m4a": (bytes(4) + b"ftypM4A " + bytes(40), "M4A"),
    "webm": (b"\x1a\x45\xdf\xa3" + bytes(40), "WebM"),
    "text": (b"Hello there.", "no audio file"),
}
#: Fields beside the file, the field at fault, and a part of the message.
FIELDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "language": ({"language": "xx"}, "language", "'xx' is none of this model's: de, en, fr"),
    "format": ({"response_format": "diarized_json"}, "response_format", "should be"),
    "words": (
        {"response_format": "verbose_json", "timestamp_granularities[]": ["segment", "word"]},
        "timestamp_granularities",
        "should be 'segment'",
    ),
    "no verbose": ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "verbose"),
    "include": ({"include[]": "words"}, "include", "should be 'logprobs'"),
    "logprobs": ({"include[]": "logprobs", "response_format": "text"}, "include", "needs"),
    "stream": ({"stream": "true", "response_format": "srt"}, "stream", "json or text"),
    "chunks": ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy", "should be 'auto'"),
    "temperature": ({"temperature": "1.5"}, "temperature", "less than or equal to 1"),
    "NaN": ({"temperature": "nan"}, "temperature", "finite"),
    "prompt": ({"prompt": "a<|endoftext|>b"}, "prompt", "special tokens"),
    "long": ({"prompt": "a" * 70_000}, "prompt", "at most 65536 bytes"),
    "text model": ({"model": TEXT}, "model", "no speech model"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("bad")
    folders: dict[str, Any] = {
        SPEAKS: write_scripted_speech(folder / SPEAKS, "Hello."),
        ENGLISH: write_speech(folder / ENGLISH, is_english=True),
        TEXT: TEXT,
    }
    with serving(folders) as process:
        yield process


def post(
    server: ServerProcess, data: bytes, path: str = TRANSCRIPTIONS, **fields: Any
) -> httpx2.Response:
    form = {"model": SPEAKS} | fields
    return httpx2.post(f"{server.url}{path}", data=form, files={"file": ("a.wav", data)})


def assert_refused(answer: httpx2.Response, param: str, why: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert why in error["message"]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named(server: ServerProcess, name: str) -> None:
    data, why = BAD[name]
    assert_refused(post(server, data), "file", why)
    # A stream that has not begun is refused as other requests are.
    assert_refused(post(server, data, stream="true"), "file", why)
    url = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    body = {"model": SPEAKS, "file_url": url}
    assert_refused(httpx2.post(f"{server.url}{TRANSLATIONS}", json=body), "file_url", why)


@pytest.mark.parametrize("name", FIELDS)
def test_a_bad_field_is_named(server: ServerProcess, name: str) -> None:
    fields, param, why = FIELDS[name]
    assert_refused(post(server, GOOD, **fields), param, why)


def test_english_models_translate_nothing(server: ServerProcess) -> None:
    answer = post(server, GOOD, TRANSLATIONS, model=ENGLISH)
    assert_refused(answer, "model", "translates nothing")
    assert_refused(post(server, GOOD, model=ENGLISH, language="de"), "language", "English alone")


def test_a_file_is_needed_once(server: ServerProcess) -> None:
    url = f"{server.url}{TRANSCRIPTIONS}"
    # Without a file, httpx would send no form.
    without = httpx2.post(url, data={"model": SPEAKS}, files={"other": ("a.wav", b"x")})
    assert_refused(without, "file", "no file named 'file'")
    files = [("file", ("a.wav", GOOD)), ("file", ("b.wav", GOOD))]
    assert_refused(httpx2.post(url, data={"model": SPEAKS}, files=files), "file", "several files")
    assert_refused(httpx2.post(url, json={"model": SPEAKS}), "file_url", "must be a URL")
    for bad in ("https://example.org/a.wav", "data:audio/wav,UklG", "data:a;base64,*", 3):
        answer = httpx2.post(url, json={"model": SPEAKS, "file_url": bad})
        assert_refused(answer, "file_url", "file_url")


def test_silence_has_an_answer(server: ServerProcess) -> None:
    assert post(server, wav(bytes(32_000))).status_code == 200


def test_a_gigabyte_is_refused_before_it_comes(server: ServerProcess) -> None:
    head = (
        f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {1 << 30}\r\n"
        "content-type: multipart/form-data; boundary=x\r\n\r\n--x"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 413 ")


@pytest.mark.skipif(not MEMORY.exists(), reason="only Linux tells a process's largest memory")
def test_bad_files_take_little_memory(server: ServerProcess) -> None:
    assert post(server, GOOD).status_code == 200
    folder = MEMORY.parents[1] / str(server.process.pid)
    before = memory_of(folder, "VmRSS")
    # The largest memory is counted from now on.
    (folder / MEMORY.name).write_text("5")
    for data, _ in BAD.values():
        assert post(server, data).status_code == 400
    assert memory_of(folder, "VmHWM") - before <= MOST_KIB


def memory_of(folder: Path, name: str) -> int:
    """Return a figure of a process's memory, in KiB."""
    (line,) = re.findall(rf"^{name}:\s+(\d+) kB$", (folder / "status").read_text(), re.MULTILINE)
    return int(line)
