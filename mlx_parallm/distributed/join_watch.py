"""Lets a process join once all ranks are there, and ends one that waits for them for ever.

MLX's ring gives up 31 s after a rank calls it, and one rank cannot call it again while others are
in it. So a rank calls it once the others are known to be there.

MLX keeps the GIL while it joins a group, so no thread of the process can notice; another process
does, which imports little. Connecting to the ports of a ring does not show which ranks run: a rank
takes every connection for its neighbour's, and does not listen while it connects to another. So the
watching processes send each other datagrams, on the UDP ports of the same numbers.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self, cast

# TELL_S: seconds between two datagrams to the same rank.
TELL_S = 0.5
# SILENT_S: a rank that was not heard for so long has ended.
SILENT_S = 5.0
# BLOCKED_S: datagrams are taken for blocked if nothing came for so long, and no port was closed.
BLOCKED_S = 10.0
# RING_PATIENCE_S: seconds for which MLX's ring waits for another rank.
RING_PATIENCE_S = 31.0
# NOTICE_S: seconds between two messages about ranks that are missing.
NOTICE_S = 30.0
# HERE: begins a datagram; the rank that sends it follows.
HERE = b"mlx_parallm rank "


@contextmanager
def joining_within(timeout_s: float, environment: Mapping[str, str]) -> Generator[None]:
    """Wait until all ranks are there, and kill this process if that and the block take longer.

    Messages name the ranks that are missing. The block begins ``RING_PATIENCE_S`` before the end
    in any case: it may not be known who is there.
    """
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(timeout_s)]
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    watcher = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment, "PYTHONPATH": path},
    )
    assert watcher.stdin is not None, "it is a pipe"
    assert watcher.stdout is not None, "it is a pipe"
    try:
        watcher.stdout.read()
        yield
    finally:
        watcher.stdin.close()
        watcher.stdout.close()
        watcher.wait()


class Presence:
    """Says that this rank is there, and hears which others are."""

    def __init__(
        self,
        hosts: Sequence[Sequence[str]],
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open this rank's ports.

        Args:
            hosts: the "host:port" addresses of each rank, which it may have several of.
            rank: this rank.
            clock: returns the time, in seconds.

        Raises:
            OSError, ValueError, LookupError: the addresses are not of this machine, or are none.
        """
        self._rank = rank
        self._clock = clock
        # When each rank was heard last.
        self._heard_s: dict[int, float] = {}
        self._began_s, self._has_answer = clock(), False
        self._others = {
            other: [_parse(address) for address in addresses]
            for other, addresses in enumerate(hosts)
            if other != rank
        }
        with ExitStack() as stack:
            self.ends = [stack.enter_context(_bound(_parse(each))) for each in hosts[rank]]
            # A connected socket gets an error if no process has the port.
            self._probes = [
                stack.enter_context(_connected(address))
                for addresses in self._others.values()
                for address in addresses
            ]
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the ports."""
        self._stack.close()

    def tell(self) -> None:
        """Notify all others that this rank is there."""
        for addresses in self._others.values():
            for address in addresses:
                for end in self.ends:
                    # An address of another network cannot be reached from each of the ports.
                    with suppress(OSError):
                        end.sendto(HERE + b"%d" % self._rank, address)
        for probe in self._probes:
            try:
                probe.send(HERE + b"%d" % self._rank)
            except ConnectionRefusedError:
                self._has_answer = True
            except OSError:
                # A network that cannot be reached says nothing about the rank.
                continue

    def hear(self, end: socket.socket) -> None:
        """Read a datagram that has come to one of the ports."""
        with suppress(OSError, ValueError):
            data = end.recv(64)
            if data.startswith(HERE):
                self._heard_s[int(data.removeprefix(HERE))] = self._clock()
                self._has_answer = True

    def missing(self) -> list[int] | None:
        """Return the ranks that were not heard lately; None if datagrams seem to be blocked."""
        if not self._has_answer and self._clock() >= self._began_s + BLOCKED_S:
            return None
        since = self._clock() - SILENT_S
        heard = {rank for rank, heard_s in self._heard_s.items() if heard_s >= since}
        return sorted(self._others.keys() - heard)


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _connected(address: tuple[str, int]) -> socket.socket:
    end = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_DGRAM)
    end.setblocking(False)
    # What cannot be reached is no reason to fail: ``send`` fails then.
    with suppress(OSError):
        end.connect(address)
    return end


def _bound(address: tuple[str, int]) -> socket.socket:
    end = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        end.bind(address)
        end.setblocking(False)
    except OSError:
        end.close()
        raise
    return end


def read_hosts(environment: Mapping[str, str]) -> list[list[str]] | None:
    """Return the addresses of each rank of a ring; None if the launcher has named none."""
    with suppress(KeyError, OSError, ValueError):
        hosts: Any = json.loads(Path(environment["MLX_HOSTFILE"]).read_text())
        if isinstance(hosts, list) and all(isinstance(each, list) for each in cast("Any", hosts)):
            return [[str(address) for address in each] for each in cast("Any", hosts)]
    return None


def open_presence(environment: Mapping[str, str]) -> Presence | None:
    """Return the presence of this rank; None if it cannot be known who is there."""
    hosts = read_hosts(environment)
    with suppress(KeyError, OSError, ValueError, LookupError):
        if hosts is not None:
            return Presence(hosts, int(environment["MLX_RANK"]))
    return None


def describe(hosts: Sequence[Sequence[str]], missing: Sequence[int] | None, late: str) -> str:
    """Return which ranks have not joined; ``missing`` is None if that is not known."""
    if missing is None:
        return f"Some ranks have not joined {late}. Check that each of them runs."
    if not missing:
        return f"Not all ranks have joined {late}, though all run. Check that they can connect."
    named = ", ".join(f"{rank} ({' '.join(hosts[rank])})" for rank in missing)
    ranks = "Rank {} has" if len(missing) == 1 else "Ranks {} have"
    return f"{ranks.format(named)} not joined {late}."


def may_join(missing: Sequence[int] | None, left_s: float) -> bool:
    """True if a rank may call MLX's ring; ``missing`` is None if that is not known."""
    return not missing or left_s <= RING_PATIENCE_S


def wait(
    presence: Presence | None,
    timeout_s: float,
    let_join: Callable[[], None],
    notice: Callable[[Sequence[int]], None],
) -> bool:
    """Return True once standard input ends; False if that takes too long.

    Args:
        presence: of this rank; None if it cannot be known who is there.
        timeout_s: how long it may take.
        let_join: called once, when this rank may join.
        notice: called with the missing ranks every ``NOTICE_S``.
    """
    began_s = time.monotonic()
    until, notice_s, tell_s = began_s + timeout_s, began_s + NOTICE_S, 0.0
    ends = [] if presence is None else presence.ends
    is_waiting = True
    while (now := time.monotonic()) < until:
        missing = None if presence is None else presence.missing()
        if is_waiting and may_join(missing, until - now):
            is_waiting = False
            let_join()
        if presence is not None and now >= tell_s:
            presence.tell()
            tell_s = now + TELL_S
        if missing and now >= notice_s:
            notice(missing)
            notice_s = now + NOTICE_S
        ready = select.select([sys.stdin, *ends], [], [], min(TELL_S, until - now))[0]
        if sys.stdin in ready:
            return True
        for end in ends:
            if presence is not None and end in ready:
                presence.hear(end)
    return False


def main(arguments: Sequence[str]) -> None:
    """Wait until standard input ends; if that takes too long, kill the process."""
    process, timeout_s = int(arguments[0]), float(arguments[1])
    presence, hosts = open_presence(os.environ), read_hosts(os.environ) or []

    def notice(missing: Sequence[int]) -> None:
        say(f"mlx_parallm serve: {describe(hosts, missing, 'yet')}")

    if wait(presence, timeout_s, let_join, notice):
        return
    missing = None if presence is None else presence.missing()
    reason = describe(hosts, missing, f"within {timeout_s:g} s")
    say(f"mlx_parallm serve: error: {reason}")
    os.kill(process, signal.SIGKILL)


def let_join() -> None:
    """Let the process that started this one join: it reads until the end of this pipe."""
    with suppress(OSError):
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def say(line: str) -> None:
    """Write a line to standard error."""
    with suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
