"""The cost to running streams of replacing an adapter by an upload.

``python -m benchmarks.adapter_swap``; on a GPU with ``--gpu``: the 8B shape in bfloat16, and the
targets. Half of the streams have the adapter and half the base model. Every upload is a LoRA of all
linear layers with other tensors; the streams' gaps are given in steps, the median gap of the second
before.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import shlex
import statistics
import sys
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from benchmarks.checks import Check, conclude
from benchmarks.fairness import gaps_within
from benchmarks.make_model import CONFIG, VOCAB_SIZE, make_model
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
from mlx_parallm.client.tensors import encode_safetensors
from tests.builders.random_models import SHAPES

ADAPTER = "policy"
PROMPT_TOKENS = 64
# LEAD_S: seconds of decoding before each upload.
LEAD_S = 1.0
WARM_TOKENS = 32
SHAPE_NAMES = ("small", "0.6B", "8B")
PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Swap:
    """One upload, by the client's clock in seconds."""

    begin_s: float
    sent_s: float
    live_s: float
    timings: dict[str, float]


def main() -> int:
    args = parse()
    config = model_config(args.shape, args.dtype)
    folder = make_model(Path(f"results/swap-{args.shape}-{args.dtype}"), config=config)
    bodies = [adapter_body(config, args.rank, args.dtype, seed) for seed in range(3)]
    mx.clear_cache()
    options = ["--dtype", args.dtype, *shlex.split(args.server_options)]
    print(f"{folder} is made; the server starts", flush=True)
    with mlx_parallm_server(folder, options) as server:
        print(f"{server.base_url} is up", flush=True)
        upload(server, bodies[0])
        print("the adapter is loaded", flush=True)
        streams = plan_streams(load_tokenizer(folder), args)
        asyncio.run(warm_up(server, streams))
        print("the streams begin", flush=True)
        records, swaps = asyncio.run(run(server, streams, bodies, args.swaps))
    for record in records:
        if record.error is not None:
            raise BenchmarkError(f"a request failed: {record.error}")
    steps, stalls = zip(*(stall_of(records, swap) for swap in swaps), strict=True)
    live = [1e3 * (swap.live_s - swap.sent_s) for swap in swaps]
    checks = [
        Check("step of the streams, ms", 1e3 * statistics.median(steps)),
        Check(
            "longest gap of a stream during an upload, in steps: median", statistics.median(stalls)
        ),
        # A gap as long as one step is no stall.
        Check(
            "longest gap of a stream during an upload, in steps: maximum",
            max(stalls),
            "<=",
            3.0 if args.gpu else None,
        ),
        Check("time from the end of the upload to serving, ms: median", statistics.median(live)),
        Check(
            "time from the end of the upload to serving, ms: maximum",
            max(live),
            "<=",
            250.0 if args.gpu else None,
        ),
        Check("size of the upload, MB", len(bodies[0]) / 1e6),
    ]
    for name in ("receive_ms", "parse_ms", "live_ms"):
        median = statistics.median(swap.timings[name] for swap in swaps)
        checks.append(Check(f"the server's {name}: median", median))
    details = {"settings": {name: str(value) for name, value in vars(args).items()}}
    return conclude("adapter_swap", checks, details | {"steps": stalls, "live_ms": live})


def parse() -> Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--gpu", action="store_true", help="the 8B shape in bfloat16, with targets")
    parser.add_argument("--shape", default="small", choices=SHAPE_NAMES)
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--swaps", type=int, default=8)
    parser.add_argument("--stream-tokens", type=int, default=1500, help="enough for all swaps")
    args = parser.parse_args()
    if args.gpu:
        args.shape, args.dtype = "8B", "bfloat16"
    return args


def model_config(shape: str, dtype: str) -> dict[str, Any]:
    """Return a Qwen3 of this shape with the benchmark's tokens and an untied head."""
    own = {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": False, "torch_dtype": dtype}
    return CONFIG | SHAPES[shape] | own


def adapter_body(config: dict[str, Any], rank: int, dtype: str, seed: int) -> bytes:
    """Return a safetensors file of a LoRA of all linear layers, small, named as PEFT names it."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    sizes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    mx.random.seed(seed)
    tensors = {}
    for layer, (name, (width, out)) in itertools.product(
        range(config["num_hidden_layers"]), sizes.items()
    ):
        path = f"base_model.model.model.layers.{layer}.{name}"
        for part, shape in (("lora_A", (rank, width)), ("lora_B", (out, rank))):
            value = (0.01 * mx.random.normal(shape)).astype(getattr(mx, dtype))
            tensors[f"{path}.{part}.weight"] = value
    mx.eval(tensors)
    return encode_safetensors(tensors)


def plan_streams(tokenizer: Tokenizer, args: Namespace) -> list[PlannedRequest]:
    """Return the streams, of which every second uses the adapter."""
    return [
        completion(
            index,
            text_of_tokens(tokenizer, PROMPT_TOKENS, index),
            args.stream_tokens,
            model=f"{SERVED_NAME}:{ADAPTER}" if index % 2 else SERVED_NAME,
            ignore_eos=True,
        )
        for index in range(args.streams)
    ]


async def warm_up(server: Server, streams: list[PlannedRequest]) -> None:
    """Bring the server to its working state."""
    client = make_client(server)
    short = [replace(stream, body=stream.body | {"max_tokens": WARM_TOKENS}) for stream in streams]
    for record in await asyncio.gather(*map(client.send, short)):
        if record.error is not None:
            raise BenchmarkError(f"a request failed: {record.error}\n{server.log_tail()}")


def upload(server: Server, body: bytes) -> Swap:
    """Replace the adapter, in one request."""
    host = server.base_url.removeprefix("http://")
    config = json.dumps({"peft_type": "LORA", "r": 16, "lora_alpha": 16})
    connection = http.client.HTTPConnection(host, timeout=120)
    begin_s = time.perf_counter()
    connection.putrequest("POST", "/v1/update_adapter_weights")
    connection.putheader("content-type", "application/octet-stream")
    connection.putheader("content-length", str(len(body)))
    connection.putheader("x-adapter-name", ADAPTER)
    connection.putheader("x-adapter-config", config)
    connection.endheaders()
    view = memoryview(body)
    for start in range(0, len(body), PIECE):
        connection.send(view[start : start + PIECE])
    sent_s = time.perf_counter()
    response = connection.getresponse()
    answer = response.read()
    live_s = time.perf_counter()
    connection.close()
    if response.status != http.client.OK:
        raise BenchmarkError(f"the upload failed: {answer[:500]!r}")
    return Swap(begin_s, sent_s, live_s, json.loads(answer)["timings"])


async def run(
    server: Server, streams: list[PlannedRequest], bodies: list[bytes], swaps: int
) -> tuple[list[RequestRecord], list[Swap]]:
    """Begin the streams, and replace their adapter again and again while they run."""
    client = make_client(server)
    tasks = [asyncio.create_task(client.send(stream)) for stream in streams]
    done: list[Swap] = []
    for number in range(swaps):
        await asyncio.sleep(LEAD_S)
        body = bodies[(number + 1) % len(bodies)]
        done.append(await asyncio.to_thread(upload, server, body))
        print(f"swap {number + 1} of {swaps}", flush=True)
    await asyncio.sleep(LEAD_S)
    if any(task.done() for task in tasks):
        raise BenchmarkError("a stream ended before the last upload; raise --stream-tokens")
    return [await task for task in tasks], done


def stall_of(records: list[RequestRecord], swap: Swap) -> tuple[float, float]:
    """Return the seconds of a step before the upload, and the longest gap in such steps."""
    before, during = (
        [gap for record in records for gap in gaps_within(record.chunk_times_s, *span)]
        for span in (
            (swap.begin_s - LEAD_S / 2, swap.begin_s),
            (swap.begin_s, swap.live_s + LEAD_S / 4),
        )
    )
    # Chunks that are read together have no gap, so they do not count.
    step = statistics.median(gap for gap in before if gap > 0)
    return step, max(during) / step


if __name__ == "__main__":
    sys.exit(main())
