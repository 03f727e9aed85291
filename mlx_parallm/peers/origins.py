"""Where the processes of engines come from: started on this machine, or dialled on another."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from mlx_parallm.engine.life import END_TIMEOUT_S
from mlx_parallm.peers.addresses import Address, check_reach, read_key
from mlx_parallm.peers.channel import Channel
from mlx_parallm.peers.handshake import Caller, StrangerError, StreamKind
from mlx_parallm.peers.launch import DEATH_TIMEOUT_S, end, launch
from mlx_parallm.peers.network import connect, tcp_channel
from mlx_parallm.types.errors import ConfigError

#: ``ENGINE_FLAG``: the setting with the addresses of engines.
ENGINE_FLAG = "--engine"
# DIAL_TIMEOUT_S: seconds for a connection and its handshake.
DIAL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class EnginePeer:
    """A process of engines, as its server has it.

    Attributes:
        channel: to the process.
        name: of the process, in log lines.
        kill: ends it at once, where this machine can.
        last_words: returns what is known of its end, once it has hung up.
        is_elsewhere: True if it runs on another machine: it has its own copies of the models, and
            must hear that this process lives.
    """

    channel: Channel
    name: str
    kill: Callable[[], None]
    last_words: Callable[[], str]
    is_elsewhere: bool = False


class Origin(Protocol):
    """Makes processes of engines, one for each life."""

    def open(self) -> AbstractContextManager[EnginePeer]:
        """Yield a new process; it has hung up and, on this machine, ended after the block.

        Raises:
            ConfigError: no process can be had.
        """
        ...


class Spawned:
    """Implements ``Origin`` by processes of this machine."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Prepare.

        Args:
            command: starts a process that calls ``serve_engines`` with a channel over the sockets
                whose descriptors are its last two arguments.
            environment: variables of the process, besides this one's.
        """
        self._command = command
        self._environment = environment

    @contextmanager
    def open(self) -> Generator[EnginePeer]:
        """See ``Origin``."""
        process, (ours, files) = launch(self._command, 2, self._environment)
        channel = Channel(ours, files)
        patience_s = DEATH_TIMEOUT_S
        try:
            yield EnginePeer(
                channel, f"process {process.pid}", process.kill, lambda: _last_words(process)
            )
            patience_s = END_TIMEOUT_S
        finally:
            channel.close()
            end(process, patience_s)


def _last_words(process: subprocess.Popen[bytes]) -> str:
    try:
        return f"The engine's process ended with {process.wait(DEATH_TIMEOUT_S)}."
    except subprocess.TimeoutExpired:
        return "The engine's process hung up."


class Dialled:
    """Implements ``Origin`` by connections to ``mlx_parallm engine``, which starts the processes.

    It keeps its number, by which the listener ends the process of an earlier life: that may have
    been stopped, or not know yet that the connection was cut.
    """

    def __init__(self, address: Address, key_file: Path | None) -> None:
        """Read the key.

        Raises:
            ConfigError: it cannot be read, or is missing for another machine.
        """
        self._address = address
        self._secret = read_key(key_file)
        check_reach(address, key_file, ENGINE_FLAG)
        self._caller = Caller(secrets.randbits(64), StreamKind.ENGINE)

    @contextmanager
    def open(self) -> Generator[EnginePeer]:
        """See ``Origin``."""
        try:
            end = connect(self._address.pair, self._secret, self._caller, DIAL_TIMEOUT_S)
        except (OSError, StrangerError) as problem:
            raise ConfigError(
                f"{ENGINE_FLAG} {self._address}: no engine is started there: {problem}."
            ) from None
        channel = tcp_channel(end)
        last_words = f"The connection to the engine at {self._address} has ended."
        try:
            yield EnginePeer(
                channel,
                f"its connection to {self._address}",
                lambda: None,
                lambda: last_words,
                is_elsewhere=True,
            )
        finally:
            channel.close()
