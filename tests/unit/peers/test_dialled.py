"""Engines that are dialled: who is let in, and what the death of either end means."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.cli.engine_process import channel_over
from mlx_parallm.cli.main import main
from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.peers import life as life_module
from mlx_parallm.peers.addresses import Address, check_reach, read_address, read_key
from mlx_parallm.peers.handshake import (
    ANSWER_BYTES,
    HELLO,
    PROTOCOL,
    WELCOME,
    Caller,
    StrangerError,
    StreamKind,
    call,
)
from mlx_parallm.peers.launch import ENGINE
from mlx_parallm.peers.life import RemoteLife
from mlx_parallm.peers.messages import Starting
from mlx_parallm.peers.network import MOST_GUESTS, connect, tcp_channel
from mlx_parallm.peers.origins import Dialled
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.types.errors import ConfigError, EngineDeadError
from mlx_parallm.types.events import ErrorEvent
from tests.engine_action import Do
from tests.listeners import Cable, Listener
from tests.processes import are_gone
from tests.scripted_engine import make_request, text_of
from tests.scripted_process import pid_of

PATIENCE_S = 60.0
# SILENCE_S: after which a silent end counts as dead.
SILENCE_S = 3.0


def scripted(script: str, *flags: str) -> Listener:
    return Listener(script, *flags, program=("tests.scripted_listener",))


def dialled_engine(
    address: Address, key_file: Path | None = None, *, restarts: bool = False, **options: Any
) -> AsyncEngine:
    config = EngineConfig(restart_on_failure=restarts)
    origin = Dialled(address, key_file)
    return AsyncEngine(config, life=RemoteLife(config, origin, ignore_progress, **options))


@pytest.fixture(autouse=True)
def patient_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine take its time to answer."""
    monkeypatch.setattr("mlx_parallm.peers.origins.DIAL_TIMEOUT_S", PATIENCE_S)


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    listener = scripted("hello")
    yield listener
    listener.stop()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef\n")
    return path


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.2:7000", Address("10.0.0.2", 7000)),
        ("[::1]:7000", Address("::1", 7000)),
        ("box.local:0", Address("box.local", 0)),
    ],
)
def test_an_address_is_read_and_written(text: str, address: Address) -> None:
    assert read_address(text, "--engine") == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", "host", ":7000", "host:", "host:x", "host:-1", "host:65536", "::1:7000", "[box]:1",
     "http://host:1", "a b:1", "host:\u0661", "host:" + "1" * 5000],
)  # fmt: skip
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--engine must be HOST:PORT"):
        read_address(text, "--engine")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_this_machine_needs_no_key(host: str) -> None:
    check_reach(Address(host, 1), None, "--engine")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "box", "localhost.example"])
def test_other_machines_need_a_key(host: str, key_file: Path) -> None:
    with pytest.raises(ConfigError, match="needs --peer-key-file"):
        Dialled(Address(host, 1), None)
    check_reach(Address(host, 1), key_file, "--engine")


def test_a_key_is_read_without_white_space(key_file: Path) -> None:
    assert read_key(key_file) == b"0123456789abcdef"
    assert read_key(None) == b""


@pytest.mark.parametrize("key", [b"", b"short", b" " * 99, b"k" * 5000])
def test_a_key_has_a_bounded_size(key: bytes, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(key)
    with pytest.raises(ConfigError, match="must have 16 to 4096 bytes"):
        read_key(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_key(tmp_path / "nothing")


def is_dropped(end: socket.socket) -> bool:
    with end, suppress(ConnectionResetError):
        while end.recv(1 << 10):
            pass
    return True


class Detonator:
    """Its pickle ends the process that reads it."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (99,)


BOMB = pickle.dumps(Detonator())


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 9,
        BOMB * 9,
        HELLO.pack(PROTOCOL, 1, StreamKind.ENGINE, bytes(32), bytes(32)) + BOMB * 9,
        HELLO.pack(PROTOCOL, 1, StreamKind.ENGINE, bytes(32), bytes(32)) + bytes(1 << 20),
        bytes(1 << 20),
    ],
    ids=["http", "pickle", "pickle for a proof", "too much", "zeros"],
)
def test_hostile_bytes_start_nothing(listener: Listener, data: bytes) -> None:
    half_open = socket.create_connection(listener.address.pair)
    with half_open, socket.create_connection(listener.address.pair) as stranger:
        with suppress(OSError):
            stranger.sendall(data)
        assert is_dropped(stranger)
    assert listener.engines == []
    assert listener.process.poll() is None


def test_those_who_wait_longest_make_room(listener: Listener) -> None:
    strangers = [socket.create_connection(listener.address.pair) for _ in range(MOST_GUESTS + 1)]
    assert is_dropped(strangers[0])
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:7000"])
def test_a_port_that_others_reach_is_not_opened_without_a_key(
    listen: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", "--listen", listen]) == 2
    assert f"--listen {listen} needs --peer-key-file" in capfd.readouterr().err


def test_a_port_that_is_taken_is_a_sentence(
    listener: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", "--listen", str(listener.address)]) == 2
    assert f"--listen {listener.address} cannot be used: " in capfd.readouterr().err


@pytest.mark.parametrize("answer", [BOMB * 99, bytes(ANSWER_BYTES), b"HTTP/1.1 400 Bad\r\n" * 99])
def test_a_server_reads_nothing_of_who_has_not_proven_the_key(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        address = Address("127.0.0.1", listening.getsockname()[1])
        dialling = pool.submit(dialled_engine(address).start)
        with listening.accept()[0] as end:
            end.sendall(answer)
            with pytest.raises(ConfigError, match="it does not know the secret"):
                dialling.result()


@pytest.mark.slow
def test_a_server_that_vanishes_leaves_a_listener_for_the_next(listener: Listener) -> None:
    for _ in range(3):
        caller = Caller(7, StreamKind.ENGINE)
        connect(listener.address.pair, b"", caller, PATIENCE_S).close()
    engine = dialled_engine(listener.address)
    engine.start()
    engine.stop()
    while listener.engines:
        pass


@pytest.mark.slow
def test_a_caller_that_resets_its_connection_ends_no_listener(listener: Listener) -> None:
    at_once = struct.pack("ii", 1, 0)
    for _ in range(8):
        talk = call(b"", Caller(7, StreamKind.ENGINE))
        with socket.create_connection(listener.address.pair) as end:
            end.sendall(next(talk).send)
            end.sendall(talk.send(end.recv(ANSWER_BYTES, socket.MSG_WAITALL)).send)
            # The listener has welcomed it, and ends the engine before this one.
            end.recv(1, socket.MSG_PEEK)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    engine = dialled_engine(listener.address)
    engine.start()
    engine.stop()


def test_tokens_wait_for_no_acknowledgement() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = socket.create_connection(listening.getsockname())
        end = listening.accept()[0]
        channels = channel_over([end]), tcp_channel(server)
        for each in (end, server):
            assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for channel in channels:
            channel.close()


@pytest.mark.parametrize("kind", [StreamKind.LOG, StreamKind.BEATS])
def test_ranks_are_no_servers(listener: Listener, kind: StreamKind) -> None:
    # Those of earlier tests may still end.
    before = listener.engines
    with pytest.raises((StrangerError, OSError)):
        connect(listener.address.pair, b"", Caller(1, kind), PATIENCE_S)
    assert set(listener.engines) <= set(before)


def test_nobody_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = Address("127.0.0.1", free.getsockname()[1])
    with pytest.raises(ConfigError, match=f"--engine {address}: no engine is started there"):
        dialled_engine(address).start()


@pytest.mark.slow
def test_only_holders_of_the_key_are_let_in(key_file: Path, tmp_path: Path) -> None:
    listener = scripted("hello", "--peer-key-file", str(key_file))
    other = tmp_path / "other"
    other.write_bytes(b"f" * 32)
    for wrong in (None, other):
        with pytest.raises(ConfigError, match="does not know the secret"):
            dialled_engine(listener.address, wrong).start()
    engine = dialled_engine(listener.address, key_file)
    engine.start()
    engine.stop()
    assert listener.stop() == 0


@pytest.mark.slow
def test_another_release_is_refused_by_both_ends() -> None:
    listener = Listener(program=("tests.other_release", "engine"))
    with pytest.raises(ConfigError, match=r"it is of release 0\.0\.7, and this end of"):
        dialled_engine(listener.address).start()
    assert listener.engines == []
    assert "and this end of 0.0.7" in listener.log
    listener.stop()


@pytest.mark.slow
async def test_requests_are_answered_and_the_process_ends_with_its_server(
    listener: Listener,
) -> None:
    engine = dialled_engine(listener.address)
    await asyncio.to_thread(engine.start)
    assert listener.engines == [await engine.call(Do(pid_of))]
    assert await text_of(engine, make_request()) == "hello"
    await asyncio.to_thread(engine.stop)
    while listener.engines:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_engine_that_dies_is_dialled_anew(listener: Listener, how: int) -> None:
    engine = dialled_engine(listener.address, restarts=True, silence_timeout_s=SILENCE_S)
    await asyncio.to_thread(engine.start)
    first = await engine.call(Do(pid_of))
    await engine.control.pause(PauseMode.KEEP)
    handle = await GENERATION.client(engine).submit(make_request("a"))
    os.kill(first, how)
    assert isinstance([event async for event in handle.events][-1], ErrorEvent)
    await asyncio.to_thread(engine.wait_until_loaded)
    # A stopped process would keep its memory.
    assert listener.engines == [await engine.call(Do(pid_of))] != [first]
    assert await text_of(engine, make_request("b")) == "hello"
    await asyncio.to_thread(engine.stop)


@pytest.mark.slow
async def test_a_cable_that_is_cut_ends_both_ends(listener: Listener) -> None:
    cable = Cable(listener.address)
    engine = dialled_engine(cable.address, restarts=True, silence_timeout_s=SILENCE_S)
    await asyncio.to_thread(engine.start)
    first = await engine.call(Do(pid_of))
    await engine.control.pause(PauseMode.KEEP)
    handle = await GENERATION.client(engine).submit(make_request("a"))
    cable.cut()
    assert isinstance([event async for event in handle.events][-1], ErrorEvent)
    # It hears no beat either, and no end of the connection.
    while not are_gone([first]):
        pass
    cable.mend()
    await asyncio.to_thread(engine.wait_until_loaded)
    assert await text_of(engine, make_request("b")) == "hello"
    await asyncio.to_thread(engine.stop)
    cable.close()


@pytest.mark.slow
def test_a_cable_that_is_cut_before_the_first_beat_is_found_out(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life_module, "DIALLED_TIMEOUT_S", SILENCE_S)
    cable = Cable(listener.address, cut_after=ANSWER_BYTES + len(WELCOME))
    engine = dialled_engine(cable.address, silence_timeout_s=SILENCE_S)
    with pytest.raises(EngineDeadError, match="has ended"):
        engine.start()
    cable.close()


@pytest.mark.slow
def test_a_process_that_imports_its_modules_says_that_it_runs() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-P", "-m", ENGINE, "--log-level", "info"]
        command += ["--log-format", "console", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        assert tcp_channel(ours).receive()[0] == Starting()
        process.kill()
        process.wait()


@pytest.mark.slow
def test_what_a_load_raises_there_is_raised_here() -> None:
    for script, error, text in (
        ("fails", ConfigError, "too little memory"),
        ("vanishes", EngineDeadError, "The connection to the engine at .* has ended"),
    ):
        listener = scripted(script)
        with pytest.raises(error, match=text):
            dialled_engine(listener.address).start()
        listener.stop()


@pytest.mark.slow
def test_engines_end_with_their_listener() -> None:
    listener = scripted("hello")
    engine = dialled_engine(listener.address)
    engine.start()
    processes = listener.engines
    assert listener.stop() == 0
    assert are_gone(processes)
    engine.stop()
