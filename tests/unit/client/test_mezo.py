"""The client of training sessions, where connections break and answers are not as promised."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import zipfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from mlx_parallm.client import (
    RequestFailedError,
    RLClient,
    ServerUnreachableError,
    UnexpectedAnswerError,
)
from mlx_parallm.client.mezo import token_averaged

DONE = b"data: [DONE]\n\n"


def event(step: int) -> bytes:
    fields = {
        "step": step,
        "seed": 7,
        "loss_plus": 0.5,
        "loss_minus": 0.4,
        "gradients": [1.0],
        "lookups": 4,
        "hits": 2,
        "layer_tokens": 10,
        "naive_layer_tokens": 20,
        "forward_time": 0.1,
    }
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class Script:
    """A server that gives each connection the next answer of a list.

    Attributes:
        requests: the first line of each request.
    """

    def __init__(self, answers: Sequence[tuple[int, bytes]]) -> None:
        self.requests: list[str] = []
        self._answers = iter(answers)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request; announce a byte too many, so that an unfinished body is noticed."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(head.decode().splitlines()[0])
        status, body = next(self._answers)
        length = len(body) + (not body.endswith(DONE) and status == 200)
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {length}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    def after(self) -> list[int]:
        """Return the steps that the requests have asked to continue after."""
        return [
            int(number) for line in self.requests for number in re.findall(r"after=(\d+)", line)
        ]


@contextlib.asynccontextmanager
async def scripted(*answers: tuple[int, bytes]) -> AsyncIterator[tuple[RLClient, Script]]:
    script = Script(answers)
    server = await asyncio.start_server(script.answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, RLClient(url) as client:
        yield client, script


async def test_events_continue_after_the_last_step_when_the_connection_breaks() -> None:
    answers = [
        (200, event(3) + event(4)),
        (503, b"it starts"),
        (200, b""),
        (200, event(5) + b'data: {"step": 6, '),
        (200, event(6) + DONE),
    ]
    # A line that was cut off is no event, so the step in it comes with the next connection.
    async with scripted(*answers) as (client, script):
        steps = [step.step async for step in client.mezo.events("a/b", after=2)]
    assert steps == [3, 4, 5, 6]
    assert script.after() == [2, 4, 4, 4, 5]
    assert script.requests[0].startswith("GET /v1/mezo/sessions/a%2Fb/events?")


async def test_a_stream_without_its_end_is_continued() -> None:
    # The body is complete for HTTP, as behind a proxy that lost its server.
    whole = event(1) + b": end\n\n"
    async with scripted((204, b""), (200, event(1) + DONE)) as (client, script):
        assert [step.step async for step in client.mezo.events("a")] == [1]
    assert script.after() == [0, 0]
    async with scripted((201, whole), (200, event(2) + DONE)) as (client, script):
        assert [step.step async for step in client.mezo.events("a")] == [1, 2]
    assert script.after() == [0, 1]


async def test_a_server_that_stays_away_is_told() -> None:
    async with scripted((200, event(1))) as (client, _):
        events = client.mezo.events("a", reconnect_s=0)
        assert (await anext(events)).step == 1
        with pytest.raises(ServerUnreachableError):
            await anext(events)


async def test_a_refusal_is_not_asked_again() -> None:
    async with scripted((404, b'{"error": {"message": "none"}}')) as (client, script):
        with pytest.raises(RequestFailedError, match="none"):
            await anext(client.mezo.events("a"))
    assert len(script.requests) == 1


async def test_an_event_of_another_form_is_told() -> None:
    async with scripted((200, b'data: {"step": 1}\n\n' + DONE)) as (client, _):
        with pytest.raises(UnexpectedAnswerError, match="seed"):
            await anext(client.mezo.events("a"))


def archive(*names: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as files:
        for name in names:
            files.writestr(name, name)
    return content.getvalue()


def written(folder: Path) -> list[Path]:
    return list(folder.iterdir())


@pytest.mark.parametrize("name", ["../a", "/a", "b/a", "..", "b\\a", "a/"])
async def test_an_archive_writes_into_its_folder_only(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    async with scripted((201, archive("good", name))) as (client, _):
        with pytest.raises(UnexpectedAnswerError, match="file of the name"):
            await client.mezo.save_adapter("a", folder)
    assert not written(tmp_path)


async def test_what_is_no_archive_is_told(tmp_path: Path) -> None:
    async with scripted((201, b"no zip")) as (client, _):
        with pytest.raises(UnexpectedAnswerError, match="no zip archive"):
            await client.mezo.save_adapter("a", tmp_path / "folder")
    assert not written(tmp_path)


def test_the_loss_of_samples_is_the_mean_over_all_their_tokens() -> None:
    rows = token_averaged([{"completion_ids": [5, 6, 7]}, {"completion_ids": [8], "advantage": 1}])
    # A session takes the mean of two rows, each the sum of its weighted tokens.
    assert [[each / 2 for each in row["weights"]] for row in rows] == [[0.25] * 3, [0.25]]
    assert rows[1]["advantage"] == 1
