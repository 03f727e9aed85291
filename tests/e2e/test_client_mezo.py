"""Training sessions of a real server by ``mlx_parallm.client``."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import signal
import zipfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import FLOATS, read_safetensors
from mlx_parallm.client import MezoClient, RequestFailedError, RLClient, TrainingSession
from mlx_parallm.client.tensors import read_folder
from tests.server_process import ServerProcess

MODEL = "demo:mlm"
WORDS = {"good": "cat", "bad": "dog"}
OBJECTIVE = {"kind": "label_words", "template": "{text} It was [MASK].", "label_words": WORDS}
ROWS = [
    {"text": "a joyful film", "label": "good"},
    {"text": "a dull film", "label": "bad"},
    {"text": "I loved every minute", "label": "good"},
    {"text": "I hated every minute", "label": "bad"},
]
# RECORD_BYTES: of the log, for a seed and one coefficient.
RECORD_BYTES = 12


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--model", MODEL)
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[RLClient]:
    async with RLClient(server.url) as client:
        yield client


@pytest.fixture
async def session(client: RLClient) -> AsyncIterator[TrainingSession]:
    session = await begin(client.mezo)
    yield session
    await client.mezo.delete(session.id)


async def begin(mezo: MezoClient) -> TrainingSession:
    return await mezo.create(
        MODEL, OBJECTIVE, ROWS, batch_size=2, trainable={"layers": "top:1", "rank": 4}
    )


async def test_a_session_begins_is_listed_and_is_deleted(client: RLClient) -> None:
    session = await begin(client.mezo)
    assert (session.model, session.status, session.step) == (MODEL, "ready", 0)
    assert (session.num_examples, session.prefix_cache, session.last) == (4, "available", None)
    assert session.config["batch_size"] == 2
    assert await client.mezo.get(session.id) == session
    assert await client.mezo.sessions() == [session]
    await client.mezo.delete(session.id)
    assert await client.mezo.sessions() == []
    with pytest.raises(RequestFailedError) as gone:
        await client.mezo.get(session.id)
    assert gone.value.status == 404


async def test_steps_are_returned_and_add_up(client: RLClient, session: TrainingSession) -> None:
    steps = await client.mezo.step(session.id, 3)
    steps += await client.mezo.train_step(session.id, batch=ROWS[:1])
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert [step.lookups for step in steps] == [2, 2, 2, 1]
    now = await client.mezo.get(session.id)
    assert (now.step, now.last) == (4, steps[-1])
    assert now.totals.hits == sum(step.hits for step in steps)
    assert now.totals.forward_s == pytest.approx(sum(step.forward_s for step in steps))
    assert [step async for step in client.mezo.events(session.id, after=1)] == steps[1:]


async def test_a_run_is_followed_paused_and_resumed(
    client: RLClient, session: TrainingSession
) -> None:
    running = await client.mezo.run(session.id, 100_000)
    assert (running.status, running.until) == ("running", 100_000)
    with pytest.raises(RequestFailedError) as busy:
        await client.mezo.step(session.id)
    assert busy.value.status == 409
    numbers: list[int] = []
    async for step in client.mezo.events(session.id):
        numbers.append(step.step)
        if step.step == 5:
            assert (await client.mezo.pause(session.id)).status == "paused"
    # A step in flight is made before the stream ends.
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 5
    assert (await client.mezo.resume(session.id)).status == "running"
    await client.mezo.pause(session.id)


async def test_events_end_when_the_session_is_deleted(client: RLClient) -> None:
    session = await begin(client.mezo)
    await client.mezo.run(session.id, 1_000_000)
    async for step in client.mezo.events(session.id):
        if step.step == 5:
            await client.mezo.delete(session.id)
    assert await client.mezo.sessions() == []


async def test_an_evaluation_and_what_was_published(
    client: RLClient, session: TrainingSession
) -> None:
    before = await client.mezo.evaluate(session.id, ROWS)
    assert (before.step, before.num_examples) == (0, 4)
    assert before.loss > 0
    assert before.accuracy is not None
    assert 0 <= before.accuracy <= 1
    await client.mezo.step(session.id, 5)
    checkpoint = await client.mezo.checkpoint(session.id)
    assert checkpoint.step == 5
    assert len(await client.mezo.log(session.id)) == 5 * RECORD_BYTES
    await client.mezo.step(session.id)
    published = await client.mezo.publish(session.id, "films", step=5, version="five")
    assert (published.name, published.version) == ("films", "five")
    assert published.digest == checkpoint.digest
    with pytest.raises(RequestFailedError) as late:
        await client.mezo.publish(session.id, "films", expected_version="four")
    assert late.value.status == 412
    assert (await client.mezo.get(session.id)).published == ["films"]
    await client.unload_adapter("films")


async def test_an_adapter_is_downloaded(
    client: RLClient, session: TrainingSession, tmp_path: Path
) -> None:
    await client.mezo.step(session.id, 2)
    folder = tmp_path / "new" / "folder"
    paths = await client.mezo.save_adapter(session.id, folder)
    assert {path.name for path in paths} == {"adapter_config.json", "adapter_model.safetensors"}
    config, content = read_folder(folder)
    tensors = read_safetensors(content, dtypes=FLOATS, param="file")
    digest = (await client.mezo.checkpoint(session.id)).digest
    adapter = read_adapter(config, tensors, param="file")
    assert adapter.of_checkpoint
    assert replace(adapter, of_checkpoint=False).digest == digest
    archive = await client.mezo.adapter(session.id, form="mlx", step=1)
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert set(files.namelist()) == {"adapter_config.json", "adapters.safetensors"}


class Relay:
    """A fixed address of a server that is killed and started again.

    Attributes:
        port: the server's port now.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on in both directions, until one side has ended."""
        with contextlib.suppress(OSError):
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.port)
            ways = [_pass_on(reader, to_writer), _pass_on(to_reader, writer)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            to_writer.close()
        writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


@pytest.mark.slow
async def test_events_continue_when_the_server_was_restarted(tmp_path: Path) -> None:
    signals = {20: signal.SIGKILL, 100: signal.SIGTERM}
    flags = ("--model", MODEL, "--data-dir", str(tmp_path))
    process = ServerProcess(*flags)
    await asyncio.to_thread(process.wait_until_ready)
    relay = Relay(process.port)
    address = await asyncio.start_server(relay.relay, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{address.sockets[0].getsockname()[1]}"
    numbers: list[int] = []
    async with RLClient(url) as client:
        session = await begin(client.mezo)
        await client.mezo.run(session.id, 200)
        async for step in client.mezo.events(session.id, reconnect_s=math.inf):
            numbers.append(step.step)
            if step.step in signals:
                await asyncio.to_thread(process.stop, signals[step.step])
                process = ServerProcess(*flags)
                relay.port = process.port
    address.close()
    assert numbers == list(range(1, 201))
    await asyncio.to_thread(process.stop)
