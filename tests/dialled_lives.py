"""Fake lives that are dialled: all but the process is as with an engine of another machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from typing_extensions import override

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.commands import Abort, Stop
from mlx_parallm.engine.kind import StartedModel
from mlx_parallm.engine.status import Readiness
from mlx_parallm.peers.addresses import Address
from mlx_parallm.peers.channel import Channel
from mlx_parallm.peers.life import RemoteLife
from mlx_parallm.peers.messages import Beat, Events, Ready, StartEngines
from mlx_parallm.peers.network import Acceptor, tcp_channel
from mlx_parallm.peers.origins import Dialled
from mlx_parallm.peers.replies import send_reply
from mlx_parallm.serving.kinds import ignore_progress
from tests.fleet_harness import Death, FakeLife


class DialledLife(RemoteLife):
    """Speaks to a fake life over TCP; only the fake one knows whether it is silent."""

    def __init__(self, fake: FakeLife) -> None:
        listener = fake_listener()
        origin = Dialled(listener.address, None)
        super().__init__(EngineConfig(), origin, ignore_progress)
        self._fake = fake
        listener.lives[origin._caller.number] = fake

    @override
    def readiness(self) -> Sequence[Readiness]:
        return self._fake.readiness()


class FakeListener:
    """In place of ``EngineListener``: the engines are fake lives of this process.

    Attributes:
        address: where it is dialled.
        lives: of each caller.
    """

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", listener.getsockname()[1])
        self.lives: dict[int, FakeLife] = {}
        self._acceptor = Acceptor(listener, b"", lambda _: None, "a test's port")
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for caller, end in self._acceptor.welcomed():
            peer = _FakePeer(tcp_channel(end), self.lives[caller.number])
            threading.Thread(target=peer.run, daemon=True).start()


@cache
def fake_listener() -> FakeListener:
    """Return the listener of this process."""
    return FakeListener()


class _FakePeer:
    """In place of ``_EnginePeer``: carries out what comes for a fake life."""

    def __init__(self, channel: Channel, life: FakeLife) -> None:
        self._channel = channel
        self._life = life

    def run(self) -> None:
        start, _ = self._channel.receive()
        assert isinstance(start, StartEngines)
        self._life.clear()
        threading.Thread(target=self._read, args=(self._life.inbox,), daemon=True).start()
        with suppress(Death, OSError):
            self._life.run(lambda events: self._channel.send(Events(events)), self._on_loaded)
        self._channel.close()

    def _on_loaded(self, loaded: Sequence[StartedModel]) -> None:
        models = [(each.config, each.model.packed(), each.is_loaded) for each in loaded]
        self._channel.send(Ready(models))

    def _read(self, inbox: Any) -> None:
        with suppress(EOFError):
            while True:
                match self._channel.receive():
                    case Beat(), _:
                        pass
                    case (Abort() | Stop()) as command, _:
                        inbox.put(command)
                    case command, number:
                        inbox.put(replace(command, reply=partial(self._reply, number)))

    def _reply(self, number: int, value: Any) -> None:
        send_reply(self._channel.send, number, value)
