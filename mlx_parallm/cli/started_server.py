"""The server that a command speaks to: a running one, or one that ends with the command."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from mlx_parallm.api.http.listener import bind
from mlx_parallm.cli.server_client import ServerClient
from mlx_parallm.client.errors import ClientError
from mlx_parallm.peers.child_process import ChildProcess
from mlx_parallm.types.errors import ParallmError

POLL_S = 0.2
#: ``LOG_LINES``: the last lines of a server's log that are shown if it does not start.
LOG_LINES = 12
LOG_NAME = "server.log"


class ServerEndedError(ParallmError):
    """A server that a command started ended before it was ready."""


@contextlib.contextmanager
def running_server(server: ServerClient, models: Sequence[str]) -> Generator[ServerClient]:
    """Yield the client of a running server; if none runs, of one that is started for the block.

    Args:
        server: where a server may run.
        models: what a new server serves; nothing for the embedded model.

    Raises:
        ServerEndedError: the new server ended; the message has the end of its log.
    """
    if server.is_running():
        yield server
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with _started(folder, models) as (process, url), ServerClient(url, server.api_key) as own:
            _wait_until_ready(process, own, folder / LOG_NAME)
            yield own


@contextlib.contextmanager
def _started(folder: Path, models: Sequence[str]) -> Generator[tuple[subprocess.Popen[bytes], str]]:
    """Yield the process of a new server, and its address; end it after the block."""
    with (folder / LOG_NAME).open("wb") as log, bind("127.0.0.1", 0) as listener:
        descriptor = listener.fileno()
        # The folder of another server's data may be in use.
        flags = ["--fd", str(descriptor), "--data-dir", str(folder / "data")]
        process = ChildProcess(
            ["mlx_parallm", "serve", *models, *flags],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C stops an answer, not the server.
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield process, url
    finally:
        process.terminate()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], server: ServerClient, log: Path) -> None:
    print("no server runs: starting one …", file=sys.stderr)
    shown = ""
    while not _is_ready(server):
        if process.poll() is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            end = "\n".join(lines[-LOG_LINES:])
            raise ServerEndedError(f"the server ended; the end of its log:\n{end}")
        progress = _progress(server)
        if progress and progress != shown:
            shown = progress
            print(shown, file=sys.stderr)
        time.sleep(POLL_S)


def _progress(server: ServerClient) -> str:
    """Return how far the server's loads are, in steps that fit lines of their own."""
    try:
        cards = server.models()
    except ClientError:
        return ""
    shares = {card["id"]: 10 * int(10 * (card.get("progress") or 0)) for card in cards}
    return ", ".join(f"loading {name}: {share} %" for name, share in shares.items() if share < 100)


def _is_ready(server: ServerClient) -> bool:
    try:
        server.ask("GET", "/ready")
    except ClientError:
        return False
    return True
