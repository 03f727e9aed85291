"""Engines with a folder for KV whose clients leave, that pause, sleep, fail and end meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm import LLM
from mlx_parallm.config import CacheConfig
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.kv_cache import fetches, opening
from mlx_parallm.generation.kv_cache.disk.files import Files, OpenFile
from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.types.events import ErrorEvent, GenerateEvent, PromptEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import ScheduledBatch
from tests.engine_action import Do
from tests.hybrid_folder import write_hybrid
from tests.integration.test_live_weights import save
from tests.integration.test_stored_engines import (
    NAME,
    NUM_CACHED,
    PROMPT,
    Process,
    Sample,
    process,
)


class GatedFiles(Files):
    """Files that are read, and written, only while a gate is open."""

    def __init__(self) -> None:
        self.reads, self.writes = threading.Event(), threading.Event()
        self.is_reading = threading.Event()
        self.open()

    def open(self) -> None:
        self.reads.set()
        self.writes.set()

    def close(self) -> None:
        """Let reads wait."""
        self.is_reading.clear()
        self.reads.clear()

    @contextmanager
    def reading(self, path: Path) -> Generator[OpenFile]:
        with super().reading(path) as file:
            self.is_reading.set()
            self.reads.wait()
            yield file

    def write_parts(self, descriptor: int, parts: Any) -> None:
        self.writes.wait()
        super().write_parts(descriptor, parts)


class EndingStore(DiskStore):
    """A store whose end lets reads go on."""

    def __init__(self, *arguments: Any, files: GatedFiles, **options: Any) -> None:
        super().__init__(*arguments, files=files, **options)
        self._gate = files

    def close(self) -> None:
        self._gate.open()
        super().close()


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedFiles]:
    """Return the files of the stores that are opened meanwhile; no read of theirs is late."""
    gated = GatedFiles()
    monkeypatch.setattr(opening, "DiskStore", partial(EndingStore, files=gated))
    monkeypatch.setattr(fetches, "LONGEST_READ_S", 1e6)
    monkeypatch.setattr(fetches.UnitPace, "predict", lambda *_: None)
    yield gated
    gated.open()


@pytest.fixture(scope="module", params=["decoder", "hybrid"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a model; a hybrid keeps a state besides KV."""
    root = tmp_path_factory.mktemp(request.param)
    return write_hybrid(root / "model") if has_state(root) else save(root / "model", 1.0)


@pytest.fixture(scope="module")
def other_folder(folder: Path) -> Path:
    """Return a folder of other weights of the same model."""
    if not has_state(folder):
        return save(folder.parent / "other", 0.5)
    other = write_hybrid(folder.parent / "other")
    weights: Any = mx.load(str(other / "model.safetensors"))
    scaled = {name: 0.5 * each if "mlp" in name else each for name, each in weights.items()}
    mx.save_safetensors(str(other / "model.safetensors"), scaled, {"format": "mlx"})
    return other


def has_state(folder: Path) -> bool:
    return "hybrid" in str(folder)


@pytest.fixture
async def memory(folder: Path, tmp_path: Path) -> Sample:
    """Fill a folder for KV; return what a hit of memory gives."""
    async with process(folder, tmp_path / "kv") as first:
        return await first.ask_twice()


async def submit(served: Process, request_id: str) -> Any:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    request = GenerateRequest(request_id=request_id, model=NAME, prompt_ids=PROMPT, params=params)
    return await GENERATION.client(served.engine).submit(request)


async def sample_of(handle: Any) -> Sample:
    events: list[GenerateEvent] = [event async for event in handle.events]
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    return Sample(
        tuple(token for event in tokens for token in event.token_ids),
        tuple(each.logprob for event in tokens for each in event.logprobs),
        sum(e.num_cached_tokens for e in events if isinstance(e, PromptEvent)),
    )


async def waiting_read(served: Process, files: GatedFiles, request_id: str = "waits") -> Any:
    """Return a request whose blocks are being read, which takes as long as the gate is closed."""
    files.close()
    handle = await submit(served, request_id)
    await asyncio.to_thread(files.is_reading.wait)
    return handle


def check_nothing_is_held(loop: Any) -> None:
    engine: GenerationEngine = loop.engines[NAME]
    engine._scheduler.check_integrity()
    assert engine._tiers is not None
    engine._tiers.check_integrity([])
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)


async def test_a_client_that_leaves_while_its_blocks_are_read_leaves_nothing(
    files: GatedFiles, folder: Path, tmp_path: Path, memory: Sample
) -> None:
    async with process(folder, tmp_path / "kv") as served:
        handle = await waiting_read(served, files)
        await served.engine.abort(handle.request_id)
        await served.engine.call(Do(check_nothing_is_held))
        files.open()
        assert await served.ask() == memory
        await served.engine.call(Do(check_nothing_is_held))


async def pause(served: Process) -> None:
    await served.engine.control.pause(PauseMode.KEEP)
    await served.engine.control.resume()


async def pause_and_forget_memory(served: Process) -> None:
    await served.engine.control.pause(PauseMode.KEEP, clear_cache=True)
    await served.engine.control.resume()


async def sleep(served: Process, level: int) -> None:
    await served.engine.control.sleep(level, PauseMode.KEEP)
    await served.engine.control.wake_up()
    await served.know_weights()


@pytest.mark.parametrize(
    "act",
    [
        pause_and_forget_memory,
        partial(sleep, level=2),
        # Less than these two do.
        pytest.param(pause, marks=pytest.mark.slow),
        pytest.param(partial(sleep, level=1), marks=pytest.mark.slow),
    ],
)
async def test_blocks_that_are_read_meanwhile_are_used_after_it(
    files: GatedFiles,
    folder: Path,
    tmp_path: Path,
    memory: Sample,
    act: Callable[[Process], Awaitable[None]],
) -> None:
    async with process(folder, tmp_path / "kv") as served:
        handle = await waiting_read(served, files)
        await act(served)
        files.open()
        assert await sample_of(handle) == memory
        await served.engine.call(Do(check_nothing_is_held))
        assert await served.ask() == memory


async def reset(served: Process) -> None:
    await served.engine.control.reset_prefix_cache(reset_running=True)


async def update(served: Process) -> None:
    await served.engine.control.update_weights_from_folder("other")


@pytest.mark.parametrize("act", [reset, update])
async def test_blocks_that_are_read_meanwhile_are_not_used_after_it(
    files: GatedFiles,
    folder: Path,
    other_folder: Path,
    tmp_path: Path,
    memory: Sample,
    act: Callable[[Process], Awaitable[None]],
) -> None:
    async with process(folder if act is reset else other_folder, tmp_path / "none") as fresh:
        wanted = await fresh.ask()
    async with process(folder, tmp_path / "kv") as served:
        handle = await waiting_read(served, files)
        await act(served)
        files.open()
        sample = await sample_of(handle)
        assert sample.cached == 0
        assert sample.is_like(wanted)
        await served.engine.call(Do(check_nothing_is_held))


async def test_a_pause_that_aborts_ends_a_request_whose_blocks_are_read(
    files: GatedFiles, folder: Path, tmp_path: Path, memory: Sample
) -> None:
    async with process(folder, tmp_path / "kv") as served:
        handle = await waiting_read(served, files)
        await served.engine.control.pause(PauseMode.ABORT)
        events = [event async for event in handle.events]
        assert events
        await served.engine.call(Do(check_nothing_is_held))
        await served.engine.control.resume()
        files.open()
        assert await served.ask() == memory


@pytest.mark.parametrize("kind", ["filled", "saved", "filled_states", "saved_states"])
async def test_a_step_that_fails_to_move_blocks_fails_its_requests_only(
    files: GatedFiles, folder: Path, tmp_path: Path, memory: Sample, kind: str
) -> None:
    def fail_once(loop: Any) -> None:
        runner = loop.engines[NAME]._runner
        submit = runner.submit

        def failing(batch: ScheduledBatch) -> Any:
            if getattr(batch.moves, kind):
                runner.submit = submit
                raise RuntimeError("the device failed")
            return submit(batch)

        runner.submit = failing

    if kind.endswith("states") and not has_state(folder):
        pytest.skip("the model keeps no state")
    is_filled = kind.startswith("filled")
    disk = tmp_path / ("kv" if is_filled else "empty")
    async with process(folder, disk) as served:
        await served.engine.call(Do(fail_once))
        events = [event async for event in (await submit(served, "fails")).events]
        if is_filled:
            assert isinstance(events[-1], ErrorEvent)
        # What is not saved yet is saved now, and fails.
        await served.stats()
        await served.engine.call(Do(check_nothing_is_held))
        again = await served.ask()
        assert again.is_like(memory)
        if is_filled:
            assert again == memory
    async with process(folder, disk) as second:
        assert (await second.ask()).cached in (0, NUM_CACHED)
        assert await second.ask() == memory


async def test_an_engine_that_dies_and_starts_again_finds_what_it_wrote(
    folder: Path, tmp_path: Path, memory: Sample
) -> None:
    async with process(folder, tmp_path / "kv", restart_on_failure=True) as served:
        assert await served.ask() == memory

        def die(_: Any) -> None:
            raise SystemExit

        with pytest.raises(Exception, match="engine"):
            await served.engine.call(Do(die))
        await asyncio.to_thread(served.engine.wait_until_loaded)
        await served.know_weights()
        assert await served.ask() == memory


def descriptors_and_threads() -> tuple[int, list[str]]:
    gc.collect()
    names = sorted(thread.name for thread in threading.enumerate())
    return len(os.listdir("/dev/fd")), [name for name in names if name.startswith("kv-disk")]


async def test_an_end_amid_reads_and_writes_leaves_nothing(
    files: GatedFiles, folder: Path, tmp_path: Path, memory: Sample
) -> None:
    await asyncio.to_thread(lambda: None)
    before = descriptors_and_threads()
    for _ in range(3):
        async with process(folder, tmp_path / "kv") as served:
            await waiting_read(served, files)
    async with process(folder, tmp_path / "kv") as served:
        await served.ask([7, *PROMPT])
    after = descriptors_and_threads()
    assert after[1] == before[1] == []
    assert after[0] <= before[0]


def test_what_llm_wrote_is_found_by_the_next_one(tmp_path: Path) -> None:
    cache = CacheConfig(
        kv_disk=tmp_path / "kv", kv_disk_bytes=1 << 28, block_size=4, kv_cache_bytes=1 << 24
    )
    prompt = " ".join(str(number) for number in range(60))
    params = SamplingParams(temperature=0, max_tokens=4)
    before = descriptors_and_threads()
    texts, cached = [], []
    for _ in range(2):
        with LLM(cache=replace(cache)) as llm:
            engine = llm._engine.client.ask(lambda state: next(iter(state.engines.values())))
            engine.result().live.contents.join()
            (answer,) = llm.generate([prompt], params)
            texts.append(answer.outputs[0].text)
            cached.append(answer.num_cached_tokens)
    assert texts[0] == texts[1]
    assert cached[0] == 0
    assert cached[1] >= 64
    assert descriptors_and_threads()[1] == before[1] == []
