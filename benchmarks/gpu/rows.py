"""The rows in order of priority. Rows that use the same model stand together."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.gpu import children, decode, packed, prefill, servers
from benchmarks.gpu.bench import Row, Target
from mlx_parallm.worker.layers.packing import AFFINE, MXFP4

#: ``DECODE_8B``: wanted speed-up over ``BatchGenerator``, by batch size.
DECODE_8B = {32: 2.5, 128: 2.5, 8: 2.0, 1: 1.3}
DECODE_06B = {1: 1.3, 8: 1.5, 32: 2.5, 128: 2.5}


def all_rows() -> list[Row]:
    """Return every row."""
    return [
        *_decode("8B", DECODE_8B),
        _floor(128, 512),
        _floor(64, 4096),
        _prefill(8, 2048, None, 1.0),
        _prefill(64, 100, None, 1.5),
        Row(
            "sampled-8B-64",
            "sampled",
            "8B, batch 64",
            partial(decode.sampled, shape="8B", batch=64),
            (Target(decode.SLOWER, "<=", 1.08),),
        ),
        Row(
            "lengths-8B-64",
            "lengths",
            "8B, batch 64, 128 to 8,192 tokens",
            partial(decode.mixed_lengths, shape="8B", batch=64, shortest=128, longest=8192),
            (Target(decode.SPREAD, "<=", 1.15), Target(decode.HELD, "<=", 1.05)),
        ),
        _kv_speed("int8", 1.3),
        Row(
            "late-prompt-8B-32",
            "late",
            "`Engine.step`: 8B, 32 rows",
            partial(decode.late_prompt, shape="8B", batch=32, prompt=16000),
            (Target(decode.STALL, "<=", 3.0),),
        ),
        _timeline("8B", 64),
        *_decode("0.6B", DECODE_06B),
        _timeline("0.6B", 128),
        *_processes(),
        _packed("4-bit", 4),
        _packed("8-bit", 8),
        _packed("mxfp4", 4, MXFP4),
        *_decode("8B", {1: 1.2, 32: 2.0}, bits=4),
        _prefill(8, 2048, 4, 1.0),
        *_decode("8B", {1: None, 32: None}, bits=8),
        *_decode("MoE", {32: 1.5}),
        *_decode("hybrid", {32: 1.5}, context=128),
        _timeline("hybrid", 32),
    ]


def _timeline(shape: str, batch: int) -> Row:
    name = f"timeline-{shape}-{batch}"
    trace = Path("results") / f"gpu-{name}.json"
    run = partial(decode.timeline, shape=shape, batch=batch, trace=trace)
    return Row(name, "timeline", f"{shape}, batch {batch}", run, (Target(decode.WAITS),))


def _decode(
    shape: str, targets: Mapping[int, float | None], *, bits: int | None = None, context: int = 512
) -> list[Row]:
    weights = "bf16" if bits is None else f"{bits}-bit"
    return [
        Row(
            f"decode-{shape}-{weights}-{batch}",
            "decode",
            f"{shape}, {weights}, batch {batch}" + (f", {context} tokens" * (context != 512)),
            partial(decode.against_stock, shape=shape, batch=batch, bits=bits, context=context),
            (Target(decode.RATIO, ">=", limit),),
        )
        for batch, limit in targets.items()
    ]


def _packed(name: str, bits: int, mode: str = AFFINE) -> Row:
    return Row(
        f"packed-8B-{name}",
        "packed",
        f"8B, {name}",
        partial(packed.against_plain, shape="8B", bits=bits, mode=mode),
        (
            Target(packed.SLOWEST, "<=", 1.1),
            Target(packed.OF_MANY_ROWS, "<=", 1.1),
            Target(packed.OF_PROMPTS, "<=", 1.1),
            Target(packed.AT_ONE_ROW, ">=", 1.5),
        ),
    )


def _processes() -> list[Row]:
    """Rows that run in processes of their own."""
    agreement = partial(
        children.own_benchmark,
        name="kv_agreement",
        arguments=["--num-prompts", "16"],
        shrunk=["--num-prompts", "1"],
        figures=[children.AGREEMENT],
    )
    many_clients = partial(servers.clients, concurrency=128, requests=384)
    crowd = {"concurrency": 256, "requests": 1024}
    speculation = partial(
        children.own_benchmark,
        name="speculation",
        arguments=[],
        shrunk=[
            "--shape",
            "tiny",
            "--dtype",
            "float32",
            "--repetitions",
            "1",
            "--full-batch",
            "17",
        ],
        figures=[children.COPY_ALONE, children.COPY_BATCH],
    )
    return [
        Row(
            "parity",
            "parity",
            "embedded model, 64 prompts",
            partial(children.parity, num_prompts=64),
            (Target(children.EQUAL, "==", 1.0), Target(children.GAP, "<=", 0.05)),
        ),
        Row(
            "kv-agreement",
            "kv",
            "embedded model, teacher-forced, 256 tokens",
            agreement,
            (Target(children.AGREEMENT, ">=", 0.99),),
        ),
        Row(
            "server-128",
            "server",
            "128 streaming clients",
            many_clients,
            (
                Target(servers.RATE, ">=", 4.0),
                Target(servers.FIRST_TOKEN, "<=", 0.5),
                Target(servers.BETWEEN, "<="),
            ),
        ),
        Row(
            "server-128-one-process",
            "server",
            "the same, the engine in the server's process",
            partial(many_clients, starts=servers.ONE_PROCESS),
            (),
        ),
        Row(
            "server-256",
            "server",
            "256 streaming clients, one engine",
            partial(servers.clients, starts=servers.ONE_ENGINE, **crowd),
            (),
        ),
        Row(
            "server-256-two-engines",
            "server",
            "256 streaming clients, two engines on this GPU",
            partial(servers.several_engines, num_engines=2, **crowd),
            (),
        ),
        Row(
            "server-late-prompt",
            "late",
            "over HTTP: 0.6B, 32 streams",
            partial(servers.late_prompt, streams=32, prompt=16000, stream_tokens=8000),
            (Target(servers.STALL, "<=", 3.0), Target(servers.STOCK_STALL)),
        ),
        Row(
            "speculation",
            "speculation",
            "0.6B, n-gram, copying",
            speculation,
            (Target(children.COPY_ALONE, ">=", 1.8), Target(children.COPY_BATCH, ">=", 1.3)),
        ),
    ]


def _kv_speed(dtype: str, limit: float) -> Row:
    return Row(
        f"kv-{dtype}-8B-64x4096",
        "kv",
        f"8B, batch 64, 4,096 tokens, {dtype} against bf16",
        partial(decode.kv_dtype, shape="8B", batch=64, context=4096, dtype=dtype),
        (Target(decode.RATIO, ">=", limit),),
    )


def _floor(batch: int, context: int) -> Row:
    return Row(
        f"floor-8B-{batch}x{context}",
        "floor",
        f"8B, batch {batch}, {context:,} tokens",
        partial(decode.floor, shape="8B", batch=batch, context=context),
        (Target(decode.SHARE, ">=", 0.65), Target(decode.SHARE_WITHOUT_TABLE)),
    )


def _prefill(count: int, length: int, bits: int | None, limit: float) -> Row:
    weights = "bf16" if bits is None else f"{bits}-bit"
    return Row(
        f"prefill-8B-{weights}-{count}x{length}",
        "prefill",
        f"8B, {weights}, {count} prompts of {length:,} tokens",
        partial(prefill.against_stock, shape="8B", count=count, length=length, bits=bits),
        (Target(prefill.RATIO, ">=", limit),),
    )
