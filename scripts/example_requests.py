"""Sends the examples of the API to a server, and compares what it answers."""

from __future__ import annotations

import base64
import json
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from string import hexdigits
from typing import Any

import httpx2

from mlx_parallm.api.http.openapi import EVENTS, JSON, Example, ExampleAnswer, ExampleRequest
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.kernels.store import FOLDER_VARIABLE
from tests import adapter_files
from tests.builders.speech_folders import write_scripted_speech
from tests.server_process import ServerProcess

# The embedded models, which the examples name.
MODELS = (
    *("mlx-parallm-demo", "demo:mlm", "demo:sentiment", "demo:embed", "demo:reward"),
    "demo:cartpole",
)
# The speech model that the examples name, and the sentence that it hears.
SPEECH_MODEL, SENTENCE = "whisper", "Hello there."
# Folders that examples name: below the first an adapter of the embedded model, and a model like it.
MODEL_FOLDER, DATA_FOLDER = "/srv/models", "/srv/data"
ADDRESS = "http://127.0.0.1:8000"
# What ids, times and durations become, so that recording twice gives the same.
ID = re.compile(r"\b((?:[a-z]+[-_])*)([0-9a-f]{32}|[0-9a-f]{24}|(?<=fp_)[0-9a-f]{12})\b")
TIME = 1767225600
ISO_TIME, ISO_TIME_RECORDED = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+"), "2026-01-01T00:00:00"
METRIC = re.compile(r"^([a-z_:]+(?:\{.*\})?) [\d.e+-]+$", re.MULTILINE)
TIME_FIELD = re.compile(r"created|expires_at|.*_at")
DURATION = 0.01
DURATION_FIELD = re.compile(r".*(_ms|_s|_latency|_time|_duration)")
DIGITS = 4
# A stream is recorded without its middle, which is cut by a comment of its protocol.
FIRST_EVENTS, LAST_EVENTS = 2, 3
MAX_LINES = 20
EVENTS_CUT = ": …"
# BINARY stands for a file that is no text, such as an archive.
BINARY = "(binary data)"
POLL_S, MAX_POLLS = 0.05, 2000
TIMEOUT_S = 600


@contextmanager
def example_server() -> Iterator[tuple[httpx2.Client, dict[str, str]]]:
    """Serve the embedded models; yield a client and the folders that stand for the examples'."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = {
            str(folder / "models"): MODEL_FOLDER,
            str(folder / "data"): DATA_FOLDER,
        }
        adapter_files.save(folder / "models" / "my-adapter", seed=1)
        shutil.copytree(DEMO_FOLDER, folder / "models" / "my-model")
        flags = (
            "--allowed-adapter-roots",
            f"{folder / 'models'}",
            "--data-dir",
            f"{folder / 'data'}",
        )
        # The examples show the defaults; tests keep no compiled kernels.
        speech = write_scripted_speech(folder / "models" / SPEECH_MODEL, SENTENCE)
        models = ("--model", *MODELS, str(speech))
        server = ServerProcess(*models, *flags, env={FOLDER_VARIABLE: ""})
        try:
            server.wait_until_ready()
            places[server.url] = ADDRESS
            with httpx2.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
                yield client, places
        finally:
            server.stop()


@dataclass(slots=True)
class Exchange:
    """The state that an example shares with those that it needs.

    Attributes:
        recorded: the recorded names of what has another name on this server, by that name.
        count: how many ids were met, by their prefix.
    """

    recorded: dict[str, str] = field(default_factory=dict)
    count: Counter[str] = field(default_factory=Counter)

    def record(self, name: str) -> str:
        """Return the recorded form of an id."""
        if name not in self.recorded:
            prefix = name.rstrip(hexdigits)
            self.count[prefix] += 1
            self.recorded[name] = f"{prefix}{self.count[prefix]:0{len(name) - len(prefix)}x}"
        return self.recorded[name]


@dataclass(frozen=True, slots=True)
class ExampleSender:
    """Sends examples to one server.

    Attributes:
        client: of the server.
        examples: by "METHOD path".
        places: the names that the examples have for folders of this machine.
    """

    client: httpx2.Client
    examples: Mapping[str, Example]
    places: Mapping[str, str]

    def send(self, key: str, *, stream: bool = False) -> ExampleAnswer:
        """Return the answer to an example, in its recorded form."""
        exchange = Exchange(dict(self.places))
        example = self.examples[key]
        self._send_needs(example, exchange)
        answer = self._send(key, exchange, stream=stream)
        for other in example.undo:
            self._send(other, exchange)
        return answer

    def _send_needs(self, example: Example, exchange: Exchange) -> None:
        for key in example.needs:
            self._send_needs(self.examples[key], exchange)
            self._send(key, exchange)

    def _send(self, key: str, exchange: Exchange, *, stream: bool = False) -> ExampleAnswer:
        example = self.examples[key]
        request = _streamed(example) if stream else example.request
        answer = answer_of(self._ask(key, request, exchange), exchange)
        for _ in range(MAX_POLLS):
            if stream or holds(answer.body, example.until):
                return answer
            time.sleep(POLL_S)
            answer = answer_of(self._ask(key, request, exchange), exchange)
        raise TimeoutError(f"{key} goes on answering {answer.body}")

    def _ask(self, key: str, request: ExampleRequest, exchange: Exchange) -> httpx2.Response:
        method, path = key.partition("#")[0].split(" ", 1)
        live = {recorded: name for name, recorded in exchange.recorded.items()}
        values = {name: replaced(value, live) for name, value in request.path.items()}
        body: dict[str, Any] = {}
        if request.json is not None:
            body["json"] = replaced(request.json, live)
        if request.form is not None:
            form = replaced(request.form, live)
            body["data"] = {name: value for name, value in form.items() if isinstance(value, str)}
            body["files"] = {
                name: (value["filename"], content_of(value))
                for name, value in form.items()
                if isinstance(value, dict)
            }
        query = replaced(dict(request.query), live)
        path = re.sub(r"\{(\w+)(:path)?\}", lambda match: values[match[1]], path)
        return self.client.request(method, path, params=query, **body)


def _streamed(example: Example) -> ExampleRequest:
    request, changes = example.request, example.stream or {}
    return ExampleRequest(
        path=request.path,
        query={**request.query, **changes.get("query", {})},
        json={**request.json, **changes.get("json", {})} if request.json is not None else None,
        form={**request.form, **changes.get("form", {})} if request.form is not None else None,
    )


def content_of(file: Mapping[str, str]) -> bytes:
    """Return the bytes of a form's file."""
    return file["text"].encode() if "text" in file else base64.b64decode(file["base64"])


def answer_of(response: httpx2.Response, exchange: Exchange) -> ExampleAnswer:
    """Return an answer in its recorded form."""
    media_type = response.headers.get("content-type", "").partition(";")[0] or None
    if not response.content:
        return ExampleAnswer(status=response.status_code)
    if media_type == JSON:
        body = recorded(response.json(), exchange)
    elif media_type == EVENTS:
        body = recorded_events(response.text, exchange)
    elif b"\0" in response.content:
        body = BINARY
    else:
        body = recorded_text(first_lines(response.text), exchange)
    return ExampleAnswer(status=response.status_code, media_type=media_type, body=body)


def first_lines(text: str) -> str:
    """Return the first lines of a text; values of metrics are fixed."""
    lines = text.splitlines(keepends=True)
    kept = "".join(lines[:MAX_LINES]) + ("…\n" if len(lines) > MAX_LINES else "")
    return METRIC.sub(r"\1 1.0", kept)


def recorded(value: Any, exchange: Exchange, name: str = "") -> Any:
    """Return a value of an answer in its recorded form: ids, times and durations are fixed."""
    match value:
        case dict():
            return {key: recorded(item, exchange, key) for key, item in value.items()}
        case list():
            return [recorded(item, exchange, name) for item in value]
        case str():
            return recorded_text(value, exchange)
        case bool() | None:
            return value
        case int() | float() if value and TIME_FIELD.fullmatch(name):
            return TIME
        case int() | float() if value and DURATION_FIELD.fullmatch(name):
            return DURATION
        case float():
            return float(f"{value:.{DIGITS}g}")
    return value


def recorded_text(text: str, exchange: Exchange) -> str:
    """Return a text with recorded ids and places."""
    text = ISO_TIME.sub(ISO_TIME_RECORDED, text)
    text = ID.sub(lambda match: exchange.record(match[0]), text)
    return replaced(text, exchange.recorded)


def recorded_events(text: str, exchange: Exchange) -> str:
    """Return the first and the last events of a stream in their recorded form."""
    events = [_recorded_event(event, exchange) for event in text.strip().split("\n\n")]
    if len(events) > FIRST_EVENTS + LAST_EVENTS:
        events[FIRST_EVENTS:-LAST_EVENTS] = [EVENTS_CUT]
    return "\n\n".join(events) + "\n\n"


def _recorded_event(event: str, exchange: Exchange) -> str:
    start, separator, data = event.partition("data: ")
    if data.startswith("{"):
        data = json.dumps(recorded(json.loads(data), exchange), ensure_ascii=False)
    return f"{start}{separator}{data}"


def replaced(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value with some names replaced in its texts."""
    match value:
        case dict():
            return {key: replaced(item, names) for key, item in value.items()}
        case list():
            return [replaced(item, names) for item in value]
        case str():
            for old, new in names.items():
                value = value.replace(old, new)
    return value


def holds(body: Any, fields: Mapping[str, Any]) -> bool:
    """True if a body has these fields."""
    return all(body.get(name) == value for name, value in fields.items())


def ends_of(events: str) -> list[Any]:
    """Return the JSON of the first and the last event of a stream."""
    lines = [line.partition("data: ")[2] for line in events.splitlines()]
    records = [json.loads(line) for line in lines if line.startswith("{")]
    return [records[0], records[-1]]


def differences(expected: Any, actual: Any, place: str = "answer") -> Iterator[str]:
    """Yield where an answer's shape differs from the recorded one: keys, and types of values.

    A list's items are each of the shape of one of the recorded ones.
    """
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in expected.keys() ^ actual.keys():
            yield f"{place}.{key} is in one of them only"
        for key in expected.keys() & actual.keys():
            yield from differences(expected[key], actual[key], f"{place}.{key}")
    elif isinstance(expected, list) and isinstance(actual, list):
        if bool(expected) != bool(actual):
            yield f"{place} is empty in one of them only"
        for index, item in enumerate(actual):
            if not any(not list(differences(other, item)) for other in expected):
                yield f"{place}[{index}] is like none that was recorded"
    elif _kind(expected) != _kind(actual):
        yield f"{place} is {actual!r}, recorded {expected!r}"


def _kind(value: Any) -> type:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float if is_number else type(value)
