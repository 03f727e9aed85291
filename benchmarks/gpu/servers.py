"""Rows over HTTP: the servers on this GPU, one after the other, on a model saved to disk."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.fairness import gaps_within
from benchmarks.gpu.bench import Bench, Outcome
from benchmarks.make_model import CONFIG, make_model
from benchmarks.measure import (
    BenchmarkError,
    chat_like_workload,
    completion,
    load_tokenizer,
    make_client,
    require_full_length,
    run_workload,
    text_of_tokens,
    warm_up,
    with_model,
)
from benchmarks.servers import Server, ServerError, mlx_lm_server, mlx_parallm_server
from mlx_parallm.bench.record import PlannedRequest, RequestRecord
from mlx_parallm.bench.statistics import percentile, summarise
from mlx_parallm.bench.workload import Lengths
from mlx_parallm.worker.device.properties import backend_name

FOLDER, SHRUNK_FOLDER = Path("results/gpu-model"), Path("results/gpu-model-shrunk")
#: ``SERVED``: Qwen3-0.6B with the benchmark's 4,096 tokens and a head of its own.
SERVED: dict[str, Any] = CONFIG | {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
}
RATE = "output tokens/s, times as many"
FIRST_TOKEN = "TTFT p99, ours over theirs"
BETWEEN = "ITL p99, ours over theirs"
STALL = "ITL p99 over its median before"
STOCK_STALL = "the same, `mlx_lm.server`"
STREAM_PROMPT_TOKENS = 64
# REASON: most characters of the reason for missing figures.
REASON = 300
#: ``LEAD_S``: seconds of streams before the long prompt; half of them are measured as "before".
LEAD_S, SHRUNK_LEAD_S = 3.0, 0.4
#: ``ONE_ENTRY``: an entry of mlx_lm.server's prompt cache holds the KV of its whole batch
#: until it is evaluated: until a prompt begins with it, as none does here. With ten entries it runs
#: out of an H100's 80 GB under 128 clients, and its generation thread ends.
ONE_ENTRY = ["--prompt-cache-size", "1"]
#: ``Starts``: how to start each kind of server; all other settings are the server's defaults.
Starts = dict[str, Callable[[Path], AbstractContextManager[Server]]]
OWN_PROCESS = "--engine-process"
#: ``PREPARED``: the log text of a server that has prepared shapes; then the seconds to wait for it.
PREPARED, MOST_PREPARING_S = "shapes prepared", 40.0
MANY_CLIENTS: Starts = {
    "ours": partial(mlx_parallm_server, options=[OWN_PROCESS]),
    "stock": partial(mlx_lm_server, options=ONE_ENTRY),
}
ONE_PROCESS: Starts = {"ours": mlx_parallm_server}
ONE_ENGINE: Starts = {"ours": partial(mlx_parallm_server, options=[OWN_PROCESS])}
#: ``STALL_MS``: milliseconds that a step with streams may take; twice the rows of mlx_lm.server at
#: once: with its 32 the prompt would wait until a stream has ended.
STALL_MS = 13
LATE_PROMPT: Starts = {
    "ours": partial(
        mlx_parallm_server, options=[OWN_PROCESS, "--max-decode-stall-ms", str(STALL_MS)]
    ),
    "stock": partial(mlx_lm_server, options=["--decode-concurrency", "64", *ONE_ENTRY]),
}


def _warm_up(server: Server, concurrency: int) -> None:
    """Send requests, after the shapes that an idle server prepares."""
    end_s = time.monotonic() + MOST_PREPARING_S
    is_ours = server.name == "mlx_parallm" and backend_name() == "cuda"
    while is_ours and time.monotonic() < end_s and PREPARED not in server.log_tail(1000):
        time.sleep(0.1)
    warm_up(server, concurrency)


def clients(
    bench: Bench, *, concurrency: int, requests: int, starts: Starts = MANY_CLIENTS
) -> Outcome:
    """Measure streaming clients in a closed loop, with prompts and outputs of mixed length."""
    folder = served_model(bench)
    count, size = bench.sizes.batch(concurrency), bench.sizes.tokens
    workload = chat_like_workload(
        bench.sizes.batch(requests),
        seed=1,
        prompt_lengths=Lengths("uniform", size(32), size(768)),
        output_lengths=Lengths("uniform", size(64), size(256)),
    )

    def measure(server: Server) -> Any:
        _warm_up(server, min(count, 32))
        records = run_workload(server, workload, count)
        require_full_length(server, workload, records)
        return summarise(records)

    results, missing = _of_each(starts, folder, measure)
    ours, stock = results["ours"], results.get("stock")
    figures = {
        "tokens/s": ours.output_tokens_per_s,
        "TTFT p99 ms": ours.ttft_ms.p99,
        "ITL p99 ms": ours.itl_ms.p99,
    }
    values = {}
    if stock is not None:
        values = {
            RATE: ours.output_tokens_per_s / stock.output_tokens_per_s,
            FIRST_TOKEN: ours.ttft_ms.p99 / stock.ttft_ms.p99,
            BETWEEN: ours.itl_ms.p99 / stock.itl_ms.p99,
        }
        figures |= {
            "`mlx_lm.server` tokens/s": stock.output_tokens_per_s,
            "`mlx_lm.server` TTFT p99 ms": stock.ttft_ms.p99,
            "`mlx_lm.server` ITL p99 ms": stock.itl_ms.p99,
        }
    details = {name: asdict(result) for name, result in results.items()}
    return Outcome(values, figures, details, missing)


def several_engines(bench: Bench, *, num_engines: int, concurrency: int, requests: int) -> Outcome:
    """Measure streaming clients of engines that share this GPU; see ``clients``."""
    options = ["--data-parallel-size", str(num_engines)]
    if backend_name() == "cuda":
        options += ["--data-parallel-devices", *["0"] * num_engines]
    starts: Starts = {"ours": partial(mlx_parallm_server, options=options)}
    return clients(bench, concurrency=concurrency, requests=requests, starts=starts)


def late_prompt(bench: Bench, *, streams: int, prompt: int, stream_tokens: int) -> Outcome:
    """Return the gaps in running streams before and while a long prompt is prefilled."""
    folder = served_model(bench)
    tokenizer = load_tokenizer(folder)
    long = completion(0, text_of_tokens(tokenizer, bench.sizes.tokens(prompt), seed=7), 4)
    running = _streams(tokenizer, bench.sizes.batch(streams), stream_tokens)
    lead_s = LEAD_S if bench.sizes.is_full else SHRUNK_LEAD_S

    def measure(server: Server) -> Any:
        _warm_up(server, min(len(running), 32))
        return _gaps(server, running, long, lead_s)

    results, missing = _of_each(LATE_PROMPT, folder, measure)
    values = {
        what: results[name]["during p99 ms"] / results[name]["before p50 ms"]
        for name, what in (("ours", STALL), ("stock", STOCK_STALL))
        # A server that sends all tokens at once has no gap.
        if name in results and results[name]["before p50 ms"]
    }
    ours, stock = results["ours"], results.get("stock", {})
    figures = {
        "ITL p50 before, ms": ours["before p50 ms"],
        "ITL p99 during, ms": ours["during p99 ms"],
        "TTFT of the prompt, ms": ours["TTFT ms"],
    }
    if stock:
        figures["its TTFT in `mlx_lm.server`, ms"] = stock["TTFT ms"]
    return Outcome(values, figures, dict(results), missing)


def _of_each(
    starts: Starts, folder: Path, measure: Callable[[Server], Any]
) -> tuple[dict[str, Any], str]:
    """Return the figures of each server, and the error of the first other server that failed."""
    results: dict[str, Any] = {}
    for name, start in starts.items():
        try:
            with start(folder) as server:
                results[name] = measure(server)
        except (BenchmarkError, ServerError) as problem:
            if name == "ours":
                raise
            return results, str(problem)[:REASON]
        print(name, results[name], flush=True)
    return results, ""


def served_model(bench: Bench) -> Path:
    """Return the folder of the model, created if needed, and free the device's memory."""
    bench.release()
    if not bench.sizes.is_full:
        return make_model(SHRUNK_FOLDER)
    folder = make_model(FOLDER, config=SERVED)
    bench.release()
    return folder


def _streams(tokenizer: Tokenizer, count: int, tokens: int) -> list[PlannedRequest]:
    return [
        completion(index, text_of_tokens(tokenizer, STREAM_PROMPT_TOKENS, index), tokens)
        for index in range(1, count + 1)
    ]


def _gaps(
    server: Server, streams: list[PlannedRequest], late: PlannedRequest, lead_s: float
) -> dict[str, float]:
    records, long = asyncio.run(_send(server, streams, late, lead_s))
    for record in (*records, long):
        if record.error is not None:
            raise BenchmarkError(f"a request failed: {record.error}\n{server.log_tail()}")
    begin_s, end_s = long.start_s, long.chunk_times_s[0]
    if any(0 < record.end_s < end_s for record in records):
        raise BenchmarkError(f"{server.name}: a stream ended before the long prompt's prefill")
    before, during = (
        [gap for record in records for gap in gaps_within(record.chunk_times_s, *span)]
        for span in ((begin_s - lead_s / 2, begin_s), (begin_s, end_s))
    )
    return {
        "before p50 ms": 1e3 * statistics.median(before),
        "during p50 ms": 1e3 * percentile(during, 50),
        "during p90 ms": 1e3 * percentile(during, 90),
        "during p99 ms": 1e3 * percentile(during, 99),
        "during max ms": 1e3 * max(during),
        "TTFT ms": 1e3 * (end_s - begin_s),
    }


async def _send(
    server: Server, streams: list[PlannedRequest], late: PlannedRequest, lead_s: float
) -> tuple[list[RequestRecord], RequestRecord]:
    """Begin the streams, send the late prompt ``lead_s`` seconds later, and end them after it."""
    client = make_client(server)
    begin_s = time.perf_counter()
    records = [RequestRecord(index=stream.index, start_s=begin_s) for stream in streams]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(client.send_into(record, with_model(stream, server.model)))
            for record, stream in zip(records, streams, strict=True)
        ]
        await asyncio.sleep(lead_s)
        long = await client.send(with_model(late, server.model))
        for task in tasks:
            task.cancel()
    return records, long
