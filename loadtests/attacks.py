"""The attacks of a hostile client, each of which runs until its process is ended."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from mlx_parallm.media.audio.wav import FLOAT
from mlx_parallm.peers.child_process import end_at_eof
from tests.audio_files import coded_samples, wav

CHAT = "/v1/chat/completions"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
#: ``SPEECH``: the name of the model that hears.
SPEECH = "speech"
DEPTH = 10_000
SCHEMA_BYTES = 1024 * 1024
NUM_GROUPS = 128
NUM_SAMPLES = 128
NUM_HALF_BODIES = 32
NUM_TEXT_CLIENTS = 8
NUM_IMAGE_CLIENTS = 8
NUM_AUDIO_CLIENTS = 8
# AUDIO_SAMPLES: of a WAV file of 60 MB, which is half an hour at 16 kHz. CODED_COPIES: of an MP3
# file of some KB, joined to one of hours. BOUNDARY: of forms.
AUDIO_SAMPLES = 30_000_000
CODED_COPIES = 30_000
CODED = ("mp3_16k", "flac_44k", "vorbis_22k")
BOUNDARY = "0123456789abcdef"
# NUM_IMAGES: as many as --max-images-per-request allows, with the refused one.
NUM_IMAGES = 15
# IMAGE_SHAPE: noise of 4 MB in base64, so that a body has 60 MB.
IMAGE_SHAPE = (1000, 1000, 3)
# IMAGE_END: base64 that is replaced in every body.
IMAGE_END = b"z" * 8
HALF_BYTES = 4 * 1024 * 1024
PAUSE_S = 0.05
RECONNECT_S = 1.0
LEAST_URGENT = 19


class Target:
    """The server, as the hostile client reaches it."""

    def __init__(self, base_url: str, key: str, model: str) -> None:
        address = urlsplit(base_url)
        self._address = (address.hostname or "", address.port or 80)
        self._key = key
        self.model = model

    def post(self, body: bytes, path: str = CHAT, kind: str = "application/json") -> int:
        """Send a whole request and read the answer; its status."""
        with contextlib.closing(
            http.client.HTTPConnection(*self._address, timeout=60)
        ) as connection:
            headers = {"content-type": kind, "authorization": f"Bearer {self._key}"}
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            response.read()
            return response.status

    def open(self, body: bytes, length: int) -> socket.socket:
        """Send a head that declares ``length`` bytes, and ``body``; leave the answer unread."""
        connection = socket.create_connection(self._address, timeout=60)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self._key}\r\ncontent-length: {length}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        return connection

    def chat(self, **fields: Any) -> bytes:
        """Return a chat's body."""
        messages = [{"role": "user", "content": "Repeat exactly: one two three"}]
        return json.dumps({"model": self.model, "messages": messages} | fields).encode()


def deep(target: Target) -> None:
    """Send JSON of 10,000 levels, as the body and as a schema."""
    nested = b'{"a":' * DEPTH + b"1" + b"}" * DEPTH
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": "HERE"}}
    with_schema = target.chat(response_format=schema).replace(b'"HERE"', nested)
    with_less = with_schema.replace(nested, b'{"a":' * 500 + b"1" + b"}" * 500)
    while True:
        for body in (nested, with_schema, with_less):
            target.post(body)
        time.sleep(PAUSE_S)


def schema(target: Target) -> None:
    """Send a JSON schema of a megabyte."""
    pattern = {"type": "string", "pattern": "^[a-z]{1,40}$", "maxLength": 40}
    size = len(json.dumps(pattern)) + 12
    properties = {f"p{number:06}": pattern for number in range(SCHEMA_BYTES // size)}
    big = {"type": "object", "properties": properties, "required": list(properties)}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": big, "strict": True}}
    body = target.chat(response_format=wanted, max_tokens=64)
    while True:
        target.post(body)
        time.sleep(PAUSE_S)


def flood(target: Target) -> None:
    """Send 128 requests of 128 samples each, without reading their streams."""
    body = target.chat(n=NUM_SAMPLES, stream=True, ignore_eos=True, max_tokens=2000, logprobs=True)
    while True:
        held = []
        for _ in range(NUM_GROUPS):
            with contextlib.suppress(OSError):
                held.append(target.open(body, len(body)))
        time.sleep(RECONNECT_S)
        for connection in held[NUM_GROUPS // 2 :]:
            connection.close()
        time.sleep(RECONNECT_S)


def half(target: Target) -> None:
    """Send bodies whose second half never comes."""
    held: list[socket.socket] = []
    while True:
        for _ in range(NUM_HALF_BODIES):
            with contextlib.suppress(OSError):
                held.append(target.open(b" " * HALF_BYTES, 2 * HALF_BYTES))
        time.sleep(RECONNECT_S)
        held = held[-4 * NUM_HALF_BODIES :]


def texts(target: Target) -> None:
    """Send, from eight clients, texts of megabytes that are refused or take long to encode."""
    bodies = long_texts(target.model)

    def send(number: int) -> None:
        while True:
            path, body = bodies[number % len(bodies)]
            with contextlib.suppress(OSError, http.client.HTTPException):
                target.post(body, path)
            number += 1

    side_by_side(send, NUM_TEXT_CLIENTS)


def side_by_side(send: Callable[[int], None], count: int) -> None:
    """Run clients, each in a thread of its own, which gets its number."""
    threads = [
        threading.Thread(target=send, args=(number,), daemon=True) for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def long_texts(model: str) -> list[tuple[str, bytes]]:
    """Return paths and bodies of long words, spaces, odd characters, a chat, ids and texts."""
    words = "word " * 1_400_000
    odd = "\U0001f469\u200d\U0001f4bb\u4f60\u0301\u00e9" * 350_000
    few = "word " * 200_000
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": words}),
        (CHAT, {"messages": [{"role": "user", "content": words}]}),
        ("/v1/completions", {"prompt": " " * 3_000_000}),
        ("/tokenize", {"prompt": few}),
        ("/v1/completions", {"prompt": odd}),
        ("/v1/responses", {"input": words}),
        ("/tokenize", {"prompt": " " * 1_000_000}),
        ("/generate", {"text": words}),
        ("/v1/messages", {"messages": [{"role": "user", "content": words}], "max_tokens": 8}),
    ]
    return [
        (path, json.dumps({"model": model, **body}, ensure_ascii=False).encode())
        for path, body in requests
    ]


def images(target: Target) -> None:
    """Send, from eight clients, 60 MB of images of which only the last one is refused."""
    body = refused_images(target)

    def send(_: int) -> None:
        while True:
            # Images that were prepared before would be found again.
            others = body.replace(IMAGE_END, os.urandom(len(IMAGE_END) // 2).hex().encode())
            with contextlib.suppress(OSError, http.client.HTTPException):
                target.post(others)

    side_by_side(send, NUM_IMAGE_CLIENTS)


def refused_images(target: Target) -> bytes:
    """Return a chat with as many large images as fit, and one that is truncated behind them."""
    urls: list[str] = []
    for seed in range(NUM_IMAGES):
        random = np.random.RandomState(seed)
        file = io.BytesIO()
        Image.fromarray(random.randint(0, 256, IMAGE_SHAPE, np.uint8)).save(
            file, "png", compress_level=0
        )
        # What follows the end of an image's file is not looked at.
        whole = file.getvalue().ljust(-(-file.tell() // 3) * 3, b"\0")
        urls.append(f"data:image/png;base64,{base64.b64encode(whole).decode()}{IMAGE_END.decode()}")
    urls.append(urls[0][:1000])
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return target.chat(messages=[{"role": "user", "content": parts}])


def audio(target: Target) -> None:
    """Send, from eight clients, recordings of up to 60 MB that are refused, most at their end."""
    bodies = refused_recordings()
    kind = f"multipart/form-data; boundary={BOUNDARY}"

    def send(number: int) -> None:
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                target.post(bodies[number % len(bodies)], TRANSCRIPTIONS, kind)
            number += 1

    side_by_side(send, NUM_AUDIO_CLIENTS)


def refused_recordings() -> list[bytes]:
    """Return forms: a sample that is no number behind many, cut files, lies, and no audio."""
    samples = np.zeros(AUDIO_SAMPLES // 2, np.float32)
    samples[-1] = np.nan
    whole = wav(samples.tobytes(), bits=32, tag=FLOAT)
    samples_of = coded_samples()
    mp3, flac, ogg = (samples_of[name].file for name in CODED)
    files = [
        whole,
        whole[: len(whole) - 2],
        mp3 * CODED_COPIES,
        flac[: len(flac) * 9 // 10],
        ogg[: len(ogg) * 9 // 10],
        wav(bytes(2000), rate=384_000),
        os.urandom(2 * AUDIO_SAMPLES),
    ]
    return [_form(file) for file in files]


def _form(file: bytes) -> bytes:
    mark, line = f"--{BOUNDARY}", "Content-Disposition: form-data; name="
    head = (
        f'{mark}\r\n{line}"model"\r\n\r\n{SPEECH}\r\n{mark}\r\n{line}"file"; filename="x"\r\n\r\n'
    )
    return head.encode() + file + f"\r\n{mark}--\r\n".encode()


ATTACKS: dict[str, Callable[[Target], None]] = {
    "schema": schema,
    "deep": deep,
    "flood": flood,
    "half": half,
    "texts": texts,
}
#: ``IMAGE_ATTACKS``: those for a model that sees.
IMAGE_ATTACKS: dict[str, Callable[[Target], None]] = {"images": images}
#: ``AUDIO_ATTACKS``: those for a model that hears.
AUDIO_ATTACKS: dict[str, Callable[[Target], None]] = {"audio": audio}


def attack_for(name: str, base_url: str, key: str, model: str) -> None:
    """Run one attack until the parent is gone; what the server does to it is not its business.

    It yields the processor to everybody: a client on another machine takes none of the server's.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        end_at_eof(parent.sentinel)
    os.nice(LEAST_URGENT)
    target = Target(base_url, key, model)
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            (ATTACKS | IMAGE_ATTACKS | AUDIO_ATTACKS)[name](target)
        time.sleep(PAUSE_S)
