"""The rows in order of priority. Rows that use the same model stand together."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu import decode, prefill
from benchmarks.gpu.bench import Row, Target

#: Batch: how many times as fast as ``BatchGenerator`` a step should be.
DECODE_8B = {32: 2.5, 128: 2.5, 8: 2.0, 1: 1.3}
DECODE_06B = {1: 1.3, 8: 1.5, 32: 2.5, 128: 2.5}


def all_rows() -> list[Row]:
    """Every row."""
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
        *_decode("0.6B", DECODE_06B),
        *_decode("8B", {1: 1.2, 32: 2.0}, bits=4),
        _prefill(8, 2048, 4, 1.0),
        *_decode("8B", {1: None, 32: None}, bits=8),
        *_decode("MoE", {32: 1.5}),
        *_decode("hybrid", {32: 1.5}, context=128),
    ]


def _decode(
    shape: str, targets: dict[int, float | None], *, bits: int | None = None, context: int = 512
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
