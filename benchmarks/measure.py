"""Prompts and timed requests that several benchmarks share."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.make_model import LEXICON_SEED, LEXICON_SIZE, make_model
from benchmarks.servers import Server
from mlx_parallm.bench.client import LoadClient
from mlx_parallm.bench.http_stream import Target
from mlx_parallm.bench.load import closed_loop
from mlx_parallm.bench.record import PlannedRequest, RequestRecord
from mlx_parallm.bench.workload import Lengths, Workload, make_lexicon, plan_requests

MODEL_FOLDER = Path("results/model")
RAMP_S = 0.5
WARM_UP_SEED = 1_000_003


class BenchmarkError(Exception):
    """A request failed, so that there is nothing to compare."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="made if it is missing")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--server-options", default="", help="more flags for mlx_parallm serve, in one argument"
    )
    return parser


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Add the flag of benchmarks whose server may have several engines."""
    parser.add_argument("--engines", type=int, default=1, help="as serve's --data-parallel-size")


def engine_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of ``mlx_parallm serve`` for ``--engines``."""
    return ["--data-parallel-size", str(args.engines)] if args.engines > 1 else []


def name_for(benchmark: str, engines: int) -> str:
    """Return under which name a benchmark's results are written."""
    return benchmark if engines == 1 else f"{benchmark}_{engines}_engines"


def prepare_model(folder: Path) -> Path:
    """Return ``folder``, with the benchmark model in it unless another model is there."""
    return folder if (folder / "config.json").exists() else make_model(folder)


def make_client(server: Server) -> LoadClient:
    """Return a client of the server."""
    return LoadClient(Target.from_url(server.base_url))


def chat_like_workload(num_requests: int, seed: int, **more: Any) -> Workload:
    """Return the mixture of the throughput target: 50-150 words in, 32-96 tokens out."""
    settings: dict[str, Any] = {
        "num_requests": num_requests,
        "seed": seed,
        "prompt_lengths": Lengths("uniform", 50, 150),
        "output_lengths": Lengths("uniform", 32, 96),
        "words": make_lexicon(LEXICON_SIZE, LEXICON_SEED),
    }
    return Workload(**(settings | more))


def run_workload(server: Server, workload: Workload, concurrency: int) -> list[RequestRecord]:
    """Run a workload in a closed loop; every request must be answered in full.

    Raises:
        BenchmarkError: a request failed.
    """
    ramp_s = RAMP_S if concurrency > 1 else 0.0
    return send_all(server, plan_requests(workload), concurrency, ramp_s)


def send_all(
    server: Server, requests: Sequence[PlannedRequest], concurrency: int, ramp_s: float = 0.0
) -> list[RequestRecord]:
    """Send requests in a closed loop; every one must be answered in full.

    Raises:
        BenchmarkError: a request failed.
    """
    named = [with_model(planned, server.model) for planned in requests]
    client = make_client(server)
    records = asyncio.run(closed_loop(named, client.send, concurrency=concurrency, ramp_s=ramp_s))
    failed = [record for record in records if record.error is not None]
    if failed:
        raise BenchmarkError(
            f"{server.name}: {len(failed)} of {len(records)} requests failed, the first with "
            f"{failed[0].error}\n{server.log_tail()}"
        )
    return records


def require_full_length(
    server: Server, workload: Workload, records: Sequence[RequestRecord]
) -> None:
    """Raise ``BenchmarkError`` unless every answer has all the tokens it was asked for."""
    for planned, record in zip(plan_requests(workload), records, strict=True):
        if record.output_tokens != planned.max_tokens:
            raise BenchmarkError(
                f"{server.name}: request {planned.index} has {record.output_tokens} tokens, "
                f"not {planned.max_tokens}"
            )


def with_model(planned: PlannedRequest, model: str | None) -> PlannedRequest:
    """Return the request with the model's name, where the server wants one."""
    return planned if model is None else replace(planned, body=planned.body | {"model": model})


def warm_up(server: Server, concurrency: int) -> None:
    """Bring the server to its working state with prompts that are not measured."""
    run_workload(server, chat_like_workload(2 * concurrency, WARM_UP_SEED), concurrency)


def load_tokenizer(model: Path) -> Tokenizer:
    """Return the model's tokenizer."""
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def text_of_tokens(
    tokenizer: Tokenizer, num_tokens: int, seed: int | str, *, start: str = ""
) -> str:
    """Return words that follow ``start`` and make it exactly ``num_tokens`` tokens in all.

    Every draw that overshoots is put back, so the text ends within some words of its start.
    """
    draw = random.Random(seed)
    words = make_lexicon(LEXICON_SIZE, LEXICON_SEED)
    parts, missing = [start], num_tokens - len(tokenizer.encode(start).ids)
    while missing > 0:
        # The tokenizer splits at spaces, so a word has the same tokens everywhere.
        word = f" {draw.choice(words)}"
        size = len(tokenizer.encode(word).ids)
        if size <= missing:
            parts.append(word)
            missing -= size
    return "".join(parts)


def completion(
    index: int, prompt: str, max_tokens: int, *, temperature: float = 0.0, **more: Any
) -> PlannedRequest:
    """Return one streamed completion request."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return PlannedRequest(
        index=index, route="/v1/completions", body=body | more, max_tokens=max_tokens
    )


def first_text_ms(record: RequestRecord) -> float:
    """Return the time to the first token."""
    return 1000 * (record.chunk_times_s[0] - record.start_s)
