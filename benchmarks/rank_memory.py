"""Measures the memory that each rank takes while it reads its part of a model.

``python -m benchmarks.rank_memory --ranks 2``

A rank may take its share and the largest tensor: it reads one whole tensor at a time, and keeps its
part. The model is made for this, of 360 MB in float32.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_parallm.config import ModelConfig
from mlx_parallm.worker.device.ranks import join_ranks
from mlx_parallm.worker.weights.loader import load_model
from tests.cluster.rank_processes import run_ranks
from tests.cluster.sharded_models import DENSE, write_model

CONFIG: dict[str, Any] = {
    **DENSE,
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 3000,
}
MB = 1e6


class Loaded(NamedTuple):
    """The memory of one rank, in bytes.

    Attributes:
        share: what it keeps.
        peak: the most while it loaded.
    """

    share: int
    peak: int


def measure(folder: Path, dtype: str) -> Loaded:
    """Return this rank's memory for a load."""
    ranks = join_ranks("ring")
    mx.reset_peak_memory()
    loaded = load_model(ModelConfig(path=str(folder), dtype=dtype), folder, ranks=ranks)
    return Loaded(loaded.weight_bytes, mx.get_peak_memory())


def largest_tensor(folder: Path) -> int:
    """Return the size of the largest tensor of a model's file, in bytes."""
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    return max(array.nbytes for array in arrays.values())


def report(size: int) -> None:
    """Print the memory of each of some ranks."""
    with TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", CONFIG)
        largest = largest_tensor(model)
        results = run_ranks(size, Path(folder), [__spec__.name, str(model)])
        for rank, loaded in enumerate(Loaded(*result) for result in results):
            allowed = loaded.share + largest
            print(
                f"rank {rank}: share {loaded.share / MB:.1f} MB, largest tensor "
                f"{largest / MB:.1f} MB, peak {loaded.peak / MB:.1f} MB "
                f"({loaded.peak / allowed:.3f} of both)"
            )


def main() -> None:
    """Report, or measure as one rank: ``python -m benchmarks.rank_memory OUTPUT FOLDER``."""
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
        output, folder = map(Path, sys.argv[1:])
        output.write_bytes(pickle.dumps(tuple(measure(folder, "float32"))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    report(parser.parse_args().ranks)


if __name__ == "__main__":
    main()
