"""Three ways to bring new weights to a server, beside running streams.

``python -m benchmarks.weight_sync`` uploads a LoRA (``lora``), lets the server read a folder
(``disk``), and starts a server anew with the folder (``restart``): the methods of
``mlx_parallm.art``. Each begins with a new server, streams, and a prompt that it has computed. The
restarted server is killed, not drained, and its clients send their streams again: its best case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from benchmarks.adapter_swap import ADAPTER, adapter_body, model_config, upload
from benchmarks.checks import Check, conclude
from benchmarks.fairness import gaps_within
from benchmarks.make_model import make_model
from benchmarks.measure import (
    BenchmarkError,
    completion,
    load_tokenizer,
    make_client,
    make_parser,
    text_of_tokens,
)
from benchmarks.servers import SERVED_NAME, Server, mlx_parallm_server
from mlx_parallm.bench.record import PlannedRequest, RequestRecord

METHODS = ("lora", "disk", "restart")
STREAM_TOKENS = 64
# LEAD_S, TAIL_S: seconds of decoding before an update, and after its first token.
LEAD_S, TAIL_S = 1.0, 0.5
RANK = 16


@dataclass(frozen=True, slots=True)
class Sync:
    """The cost of one update.

    Attributes:
        first_token_s: from its begin to the first token of the new weights.
        gap_s: the longest that a stream waited meanwhile.
        cached_tokens: of the prompt that was computed before, for requests of the model itself.
    """

    first_token_s: float
    gap_s: float
    cached_tokens: int


def main() -> int:
    args = parse()
    config = model_config(args.shape, args.dtype)
    folders = [
        make_model(Path(f"results/sync-{args.shape}-{args.dtype}-{seed}"), config=config, seed=seed)
        for seed in range(2)
    ]
    body = adapter_body(config, RANK, args.dtype, seed=0)
    mx.clear_cache()
    plan = Plan(folders, body, load_tokenizer(folders[0]), args)
    syncs: dict[str, list[Sync]] = {}
    for method in METHODS:
        syncs[method] = [asyncio.run(plan.run(method)) for _ in range(args.repetitions)]
        print(f"{method}: {syncs[method]}", flush=True)
    checks = [check for method in METHODS for check in checks_of(method, syncs[method])]
    checks.append(Check("tokens of the prompt that was computed before", args.prompt_tokens))
    checks.append(Check("size of the adapter, MB", len(body) / 1e6))
    size = sum(file.stat().st_size for file in folders[1].glob("*.safetensors"))
    checks.append(Check("size of the folder, MB", size / 1e6))
    checks.append(Check("load average of the machine", os.getloadavg()[0]))
    settings = {name: str(value) for name, value in vars(args).items()}
    return conclude("weight_sync", checks, {"settings": settings})


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="small", choices=["small", "0.6B", "8B"])
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-tokens", type=int, default=400, help="enough for an update")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    return parser.parse_args()


def checks_of(method: str, syncs: Sequence[Sync]) -> list[Check]:
    """Return the medians of a method."""
    figures = {
        "seconds until the first token of the new version": [sync.first_token_s for sync in syncs],
        "longest gap of a stream, s": [sync.gap_s for sync in syncs],
        "cached tokens after it": [sync.cached_tokens for sync in syncs],
    }
    return [Check(f"{method}: {what}", statistics.median(own)) for what, own in figures.items()]


class Plan:
    """The updates of a run."""

    def __init__(
        self, folders: Sequence[Path], body: bytes, tokenizer: Tokenizer, args: argparse.Namespace
    ) -> None:
        """Plan the streams and the prompt of every update; ``folders`` are the old and the new."""
        self._folders = folders
        self._body = body
        roots = str(folders[1].parent.resolve())
        self._options = ["--dtype", args.dtype, "--allowed-adapter-roots", roots]
        self._options += shlex.split(args.server_options)
        prompts = [text_of_tokens(tokenizer, STREAM_TOKENS, index) for index in range(args.streams)]
        self._streams = [
            completion(index, prompt, args.stream_tokens, model=SERVED_NAME, ignore_eos=True)
            for index, prompt in enumerate(prompts)
        ]
        self._prompt = text_of_tokens(tokenizer, args.prompt_tokens, "prompt")
        self._short = text_of_tokens(tokenizer, STREAM_TOKENS, "short")

    async def run(self, method: str) -> Sync:
        """Return what one update cost, on a server of its own."""
        with self._server(0) as server:
            await self._ask(server, SERVED_NAME, self._prompt)
            tasks = self._begin(server)
            await asyncio.sleep(LEAD_S)
            begin_s = time.perf_counter()
            if method == "restart":
                await asyncio.to_thread(server.kill)
                before = await asyncio.gather(*tasks)
            else:
                await asyncio.to_thread(self._update(method), server)
                name = f"{SERVED_NAME}:{ADAPTER}" if method == "lora" else SERVED_NAME
                return await self._measured(server, name, begin_s, tasks, [])
        # All streams are dead, so waiting for the server may block the client.
        with self._server(1) as server:
            return await self._measured(server, SERVED_NAME, begin_s, self._begin(server), before)

    async def _measured(
        self,
        server: Server,
        name: str,
        begin_s: float,
        tasks: Sequence[asyncio.Task[RequestRecord]],
        before: Sequence[RequestRecord],
    ) -> Sync:
        """Measure an update that has been made.

        Args:
            server: has the new weights.
            name: the name of the new version.
            begin_s: when the update began.
            tasks: the streams.
            before: the same streams of the server that was killed, if there was one.
        """
        first = await self._ask(server, name, self._short)
        first_s = first.chunk_times_s[0]
        after = await self._ask(server, SERVED_NAME, self._prompt)
        await asyncio.sleep(TAIL_S)
        records = list(await asyncio.gather(*tasks))
        failed = [record.error for record in records if record.error is not None]
        if failed or min(record.end_s for record in records) < first_s:
            raise BenchmarkError(f"a stream ended too early: {failed}; raise --stream-tokens")
        times = [record.chunk_times_s for record in records]
        for record, own in zip(before, times, strict=bool(before)):
            own[:0] = record.chunk_times_s
        gaps = [gap for own in times for gap in gaps_within(own, begin_s, first_s)]
        return Sync(first_s - begin_s, max(gaps), after.cached_tokens)

    def _server(self, number: int) -> AbstractContextManager[Server]:
        return mlx_parallm_server(self._folders[number], self._options)

    def _begin(self, server: Server) -> list[asyncio.Task[RequestRecord]]:
        client = make_client(server)
        return [asyncio.create_task(client.send(stream)) for stream in self._streams]

    async def _ask(self, server: Server, name: str, prompt: str) -> RequestRecord:
        """Return the record of a request for a token behind a prompt."""
        planned: PlannedRequest = completion(0, prompt, 1, model=name, ignore_eos=True)
        record = await make_client(server).send(planned)
        if record.error is not None:
            raise BenchmarkError(f"a request failed: {record.error}\n{server.log_tail()}")
        return record

    def _update(self, method: str) -> Callable[[Server], Any]:
        """Return what brings the new weights to a server."""
        if method == "lora":
            return lambda server: upload(server, self._body)
        return lambda server: read_folder(server, self._folders[1])


def read_folder(server: Server, folder: Path) -> None:
    """Let a server read its weights from another folder."""
    body = json.dumps({"model_path": str(folder.resolve()), "flush_cache": False}).encode()
    request = urllib.request.Request(
        f"{server.base_url}/update_weights_from_disk",
        data=body,
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        answer.read()


if __name__ == "__main__":
    sys.exit(main())
