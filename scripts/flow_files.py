"""The files of this checkout's package that one decode step and one streamed chat enter.

    python -m mlx_parallm.process_setup.openblas scripts.flow_files [--list]

The embedded model decodes three rows, and the step after several others is profiled. The chat is
of 16 tokens, over HTTP to a server in this process; all of its threads are profiled. Each runs
before it is profiled, so that what is computed once is left out. Modules are not entered by being
imported. Depth counts the package's frames on the stack that were entered meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import socket
import sys
import threading
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import mlx_parallm
from mlx_parallm.api.app import create_app
from mlx_parallm.api.http.connection import BoundedProtocol
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.cli.api_servers.connections import UvicornServer, uvicorn_config
from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.build import build_engines
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.worker.worker import Worker

PACKAGE = str(Path(mlx_parallm.__file__).parent)
NUM_ROWS, PROMPT_TOKENS, NUM_TOKENS, EARLIER_STEPS = 3, 20, 16, 8
# CONFIG: what servers do by default, in one process.
CONFIG = EngineConfig(models=(ModelConfig(),))
CHAT = {
    "messages": [{"role": "user", "content": "Write a long story."}],
    "max_tokens": NUM_TOKENS,
    "min_tokens": NUM_TOKENS,
    "stream": True,
}


@dataclass
class Flow:
    """Files and functions entered while profiling; several threads may add to it.

    Attributes:
        is_on: True while it counts.
        calls: calls by function.
        deepest: the most frames of the package on one stack, the innermost first.
    """

    is_on: bool = False
    calls: Counter[CodeType] = field(default_factory=Counter[CodeType])
    deepest: tuple[CodeType, ...] = ()

    @property
    def files(self) -> Counter[str]:
        """The functions entered by file."""
        return Counter(map(_file, self.calls))

    def note(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Count a call; see ``sys.setprofile``."""
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls[frame.f_code] += 1
            self.deepest = max(self.deepest, tuple(self._stack(frame)), key=len)

    def _stack(self, frame: FrameType | None) -> Generator[CodeType]:
        while frame is not None:
            if frame.f_code in self.calls:
                yield frame.f_code
            frame = frame.f_back


def main() -> None:
    """Print a line for each flow, and with ``--list`` its files and its deepest stack."""
    parser = argparse.ArgumentParser(description="Count the files that a request runs through.")
    parser.add_argument("--list", action="store_true", help="list files and the deepest stack")
    args = parser.parse_args()
    flows = {
        f"a decode step of {NUM_ROWS} rows": decode_step(),
        f"a streamed chat of {NUM_TOKENS} tokens": streamed_chat(),
    }
    for name, flow in flows.items():
        print(
            f"{name}: {len(flow.files)} files, {len(flow.calls)} functions, "
            f"{flow.calls.total()} calls, depth {len(flow.deepest)}"
        )
        if args.list:
            for file, count in sorted(flow.files.items()):
                print(f"{count:>5}  {file}")
            print("the deepest stack:")
            for code in reversed(flow.deepest):
                print(f"       {_file(code)} {code.co_qualname}")


def decode_step() -> Flow:
    """Return one step of an engine on this thread, in which all rows decode."""
    (built,) = build_engines(CONFIG, MetricFamilies(), Worker(), ignore_progress)
    engine = cast("GenerationEngine", built.engine)
    prompts = [[10 + row] * PROMPT_TOKENS for row in range(NUM_ROWS)]
    load = DecodeLoad(engine, prompts)
    load.prefill()
    load.decode(EARLIER_STEPS)
    flow = Flow(is_on=True)
    sys.setprofile(flow.note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return flow


def streamed_chat() -> Flow:
    """Return one chat by HTTP, from the connection to its last event."""
    flow = Flow()
    # Threads that start from now on are profiled.
    threading.setprofile(flow.note)
    engine = AsyncEngine(CONFIG)
    engine.start()
    try:
        with served(engine) as port:
            chat(port)
            flow.is_on = True
            chat(port)
            flow.is_on = False
    finally:
        engine.stop()
        threading.setprofile(None)  # type: ignore[arg-type]
    return flow


@contextlib.contextmanager
def served(engine: AsyncEngine) -> Generator[int]:
    """Serve an engine on a thread of this process; yield the port."""
    config = ServerConfig()
    app = create_app(engine, config, max_waiting=CONFIG.scheduler.max_waiting, bound_to="127.0.0.1")
    protocol = partial(BoundedProtocol, timeout_s=config.client_timeout_s)
    server = UvicornServer(uvicorn_config(app, config, protocol))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def chat(port: int) -> None:
    """Read one streamed chat to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(CHAT), headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, text
    assert text.rstrip().endswith("[DONE]"), text
    connection.close()


def _file(code: CodeType) -> str:
    return code.co_filename.removeprefix(PACKAGE + "/")


if __name__ == "__main__":
    main()
