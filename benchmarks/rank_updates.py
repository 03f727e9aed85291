"""Updates of all weights of a model over ranks: part of ``benchmarks.rank_decode --updates``.

It measures how fast uploaded tensors reach the devices of all ranks, and what an update takes while
the engine is idle and while rows decode.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.arrays import to_host, to_mlx
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.device.shared_tensors import (
    SharedTensor,
    as_words,
    in_groups,
    on_devices,
    share_large,
)

# REPEATS: an update is measured so often after a first one, which allocates memory.
REPEATS = 3
# SUM_BYTES: most bytes of the sum that is measured alone.
SUM_BYTES = 1 << 30


def tensors_of(folder: Path, *, is_whole: bool = True) -> dict[str, HostTensor]:
    """Return the tensors of a model's files in host memory; without numbers unless ``is_whole``."""
    tensors: dict[str, HostTensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        arrays: Any = mx.load(str(file))
        for name in list(arrays):
            array = arrays.pop(name)
            tensors[name] = to_host(array) if is_whole else _without_numbers(array)
    return tensors


def _without_numbers(array: mx.array) -> HostTensor:
    is_bfloat16 = array.dtype == mx.bfloat16
    like = to_host(mx.zeros(1, array.dtype)).array
    return HostTensor(np.broadcast_to(like[0], array.shape), is_bfloat16)


def sharing(folder: Path, ranks: Ranks) -> dict[str, float]:
    """Return how fast large tensors of rank 0 reach all devices; all ranks must call.

    If the model has no large ones, all are shared.
    """
    tensors = tensors_of(folder, is_whole=ranks.rank == 0)
    sent = share_large(tensors, ranks.backend)
    large = {name: tensor for name, tensor in sent.items() if isinstance(tensor, SharedTensor)}
    large = large or {
        name: SharedTensor(tensor.array, tensor.is_bfloat16) for name, tensor in tensors.items()
    }
    num_bytes = sum(tensor.nbytes for tensor in large.values())
    words = mx.zeros(min(SUM_BYTES, max(num_bytes, 4)) // 4, mx.uint32)
    mx.eval(words)

    def upload() -> None:
        # MLX moves an array to the device when a kernel first reads it.
        for group in in_groups(large):
            mx.eval([as_words(to_mlx(tensor)) + 1 for tensor in group.values()])

    def share() -> None:
        for group in in_groups(large):
            on_devices(group, ranks)

    upload_s = _seconds(upload, ranks) if ranks.rank == 0 else _seconds(lambda: None, ranks)
    share_s = _seconds(share, ranks)
    sum_s = _seconds(lambda: mx.eval(ranks.sum(words)), ranks)
    return {
        "large tensors": len(large),
        "GB": num_bytes / 1e9,
        "upload to one device s": upload_s,
        "upload and share s": share_s,
        "shared GB/s, upload included": num_bytes / 1e9 / share_s,
        "shared GB/s, upload subtracted": num_bytes / 1e9 / max(share_s - upload_s, 1e-9),
        "sum GB/s": words.nbytes / 1e9 / sum_s,
    }


def _seconds(work: Callable[[], None], ranks: Ranks) -> float:
    """Return the median time of some work that all ranks begin together."""
    times: list[float] = []
    for _ in range(REPEATS + 1):
        ranks.agree(True)
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def update_figures(
    engine: Any, folder: Path, prompts: Sequence[Sequence[int]], warm_up: int
) -> dict[str, Any]:
    """Return what updates of all weights take, while idle and while prompts are continued."""
    update = WeightsUpdate(tensors=tensors_of(folder))
    assert update.tensors is not None
    num_bytes = sum(tensor.nbytes for tensor in update.tensors.values())
    _replace(engine, update)
    idle_s = statistics.median(_replace(engine, update) for _ in range(REPEATS))
    load = DecodeLoad(engine, prompts, name="updated")
    load.prefill()
    load.decode(warm_up)
    step_ms = statistics.median(load.decode(20))
    gaps: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        _replace(engine, update)
        # The first step after it only begins.
        while not load.step()[1]:
            pass
        gaps.append(time.perf_counter() - began)
        load.decode(5)
    load.end()
    while engine.has_work():
        engine.step()
    return {
        "GB": num_bytes / 1e9,
        "idle s": idle_s,
        "idle GB/s": num_bytes / 1e9 / idle_s,
        "rows": len(prompts),
        "step ms": step_ms,
        "gap of a live update s": statistics.median(gaps),
    }


def _replace(engine: Any, update: WeightsUpdate) -> float:
    """Replace all weights; return the seconds."""
    began = time.perf_counter()
    engine.live.prepare(update)
    engine.settle()
    engine.live.commit()
    return time.perf_counter() - began
