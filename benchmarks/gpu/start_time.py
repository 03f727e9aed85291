"""The time until ``mlx_parallm serve`` answers on an NVIDIA GPU, and the cost of a kernel call.

``python -m benchmarks.gpu.start_time`` starts servers of random models of 0.6B and 8B shape:

- ``mlx``: MLX compiles the kernels (``--without-mlx`` leaves it out: it takes minutes),
- ``first``: with empty folders of compiled kernels, ours and MLX's own,
- ``second``: with what the first start left there,
- ``mlx_lm.server``: for comparison.

MLX's own kernels are on disk at all but the first. It prints seconds until ``/health`` and until
the first answer, and whether all of ours answer alike. With ``--calls`` it starts no server, but
measures what the host takes for a call of each kind of kernel, and compares what they compute.
``--shrink`` runs on a CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.gpu.servers import SERVED
from benchmarks.make_model import CONFIG, LEXICON_SEED, LEXICON_SIZE, make_model
from benchmarks.servers import SERVED_NAME, Server, running_server
from mlx_parallm.bench.workload import make_lexicon
from mlx_parallm.kernels.device_precompiler import CUDA_TYPES, device_precompiler
from mlx_parallm.kernels.language import CudaLanguage
from mlx_parallm.kernels.precompiled import Precompiler
from mlx_parallm.kernels.store import FOLDER_VARIABLE
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.device.properties import backend_name

RESULTS = Path("results")
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": SERVED,
    "8B": SERVED
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
    },
    "tiny": CONFIG,
}
MLX_FOLDER_VARIABLE = "MLX_PTX_CACHE_DIR"
THEIRS = "mlx_lm.server"
_WORDS = make_lexicon(LEXICON_SIZE, LEXICON_SEED)
PROMPTS = tuple(" ".join(_WORDS[:length]) for length in (5, 40, 200, 700))
TIMEOUT_S = 120.0
MAX_TOKENS = 48
SHOWN = ("Compiling", "GPU kernels", "shapes prepared", "compiles", "not used", "not kept")
CALLS, ROUNDS = 200, 7


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the start of a process, and its answer."""

    healthy_s: float
    answer_s: float
    texts: tuple[str, ...]
    log: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.start_time", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "8B"], choices=list(SHAPES))
    parser.add_argument("--without-mlx", action="store_true")
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--shrink", action="store_true")
    args = parser.parse_args()
    if args.calls:
        print(json.dumps(call_costs(), indent=1))
        return 0
    results = {}
    is_right = True
    for shape in ["tiny"] if args.shrink else args.shapes:
        starts = start_times(shape, with_mlx=not args.without_mlx)
        results[shape] = {name: asdict(start) for name, start in starts.items()}
        texts = {start.texts for name, start in starts.items() if name != THEIRS}
        print(f"{shape}: answers are {'alike' if len(texts) == 1 else 'NOT ALIKE'}", flush=True)
        is_right = is_right and len(texts) == 1
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "start_time.json").write_text(json.dumps(results, indent=1))
    return int(not is_right)


def start_times(shape: str, *, with_mlx: bool) -> dict[str, Start]:
    """Start each kind of server, each in a fresh process."""
    folder = make_model(RESULTS / f"start-model-{shape}", config=SHAPES[shape])
    # Free the memory, so that servers have the device to themselves.
    mx.clear_cache()
    print(f"{shape}:", flush=True)
    starts: dict[str, Start] = {}
    with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as mlx:
        folders = {FOLDER_VARIABLE: ours, MLX_FOLDER_VARIABLE: mlx}
        for name in ("first", "second", THEIRS, *(["mlx"] if with_mlx else [])):
            starts[name] = _start(name, folder, folders)
    return starts


def _start(name: str, folder: Path, environment: Mapping[str, str]) -> Start:
    with _environment(environment):
        begin_s = time.monotonic()
        with running_server(name, _command(name, folder), _model(name)) as server:
            healthy_s = time.monotonic() - begin_s
            texts = [_answer(server, PROMPTS[0])]
            answer_s = time.monotonic() - begin_s
            texts += [_answer(server, prompt) for prompt in PROMPTS[1:]]
            lines = server.log.read_text(errors="replace").splitlines()
    log = tuple(line for line in lines if any(word in line for word in SHOWN))
    print(f"{name}: healthy after {healthy_s:.1f} s, answers after {answer_s:.1f} s", flush=True)
    for line in log:
        print(f"    {line[:200]}", flush=True)
    return Start(healthy_s, answer_s, tuple(texts), log)


def _command(name: str, folder: Path) -> list[str]:
    if name == THEIRS:
        return ["mlx_lm", "server", "--model", str(folder)]
    program = "benchmarks.gpu.stock_kernels" if name == "mlx" else "mlx_parallm"
    return [program, "serve", "--model", str(folder), "--served-model-name", SERVED_NAME]


def _model(name: str) -> str | None:
    return None if name == THEIRS else SERVED_NAME


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _answer(server: Server, prompt: str) -> str:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    if server.model is not None:
        body["model"] = server.model
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def call_costs() -> dict[str, Any]:
    """Measure what the host takes for a call of a decode row's attention, by kind of kernel.

    Returns:
        Microseconds a call: ``build`` in Python, ``submit`` in ``mx.async_eval``, and ``replay`` of
        a function that MLX compiled; and whether all kinds compute the same.
    """
    results: dict[str, Any] = {}
    outputs = {}
    for kind, language in _languages().items():
        trial = _CallTrial(language)
        outputs[kind] = trial.output()
        results[kind] = trial.costs()
        print(kind, results[kind], flush=True)
    first, *others = outputs.values()
    results["equal"] = all(mx.array_equal(first, other).item() for other in others)
    return results


def _languages() -> dict[str, CudaLanguage]:
    """Return one whose kernels MLX compiles, and two of precompiled kernels."""
    if backend_name() != "cuda":
        sys.exit("--calls needs an NVIDIA GPU")
    precompiler = device_precompiler()
    if precompiler is None or precompiler.why_not is not None:
        sys.exit(f"kernels are not precompiled: {precompiler and precompiler.why_not}")
    whole = Precompiler(precompiler.compiler, mx.fast.precompiled_cuda_kernel, CUDA_TYPES)
    assert whole.why_not is None
    whole.takes_keys = False
    return {
        "compiled by MLX": CudaLanguage(lambda: None),
        "precompiled": CudaLanguage(lambda: precompiler),
        "precompiled, whole code a call": CudaLanguage(lambda: whole),
    }


class _CallTrial:
    """A row that attends repeatedly, each time with the previous call's output."""

    def __init__(self, language: CudaLanguage) -> None:
        self._backend = KernelAttention(16, language)
        shape = LayerShape(num_kv_heads=8, key_dim=128, value_dim=128, dtype=mx.bfloat16)
        self._pool = self._backend.new_pool(shape, 8)
        rows = mx.random.normal((100, 32, 1, 128), mx.bfloat16, key=mx.random.key(0))
        prompt = ScheduledSequence(
            seq_id=0, slot=0, start=0, token_ids=(1,) * 100, block_table=tuple(range(8))
        )
        self._backend.write(self._pool, self._backend.plan([prompt]), rows[:, :8], rows[:, 8:16])
        self._queries = rows[:1]
        self._plan = self._backend.plan([replace(prompt, start=99, token_ids=(1,))])
        mx.eval(self.output())

    def output(self) -> mx.array:
        """Return what a call gives."""
        return self._call(self._queries)

    def costs(self) -> dict[str, float]:
        """Return microseconds a call, the medians of some rounds."""
        compiled = mx.compile(self._chain)
        mx.eval(compiled(self._queries))
        rounds = [self._round(compiled) for _ in range(ROUNDS)]
        return {
            name: round(statistics.median(times[name] for times in rounds), 2) for name in rounds[0]
        }

    def _round(self, compiled: Callable[[mx.array], mx.array]) -> dict[str, float]:
        mx.synchronize()
        times = [time.perf_counter()]
        output = self._chain(self._queries)
        times.append(time.perf_counter())
        mx.async_eval(output)
        times.append(time.perf_counter())
        mx.synchronize()
        begin_s = time.perf_counter()
        mx.async_eval(compiled(self._queries))
        end_s = time.perf_counter()
        mx.synchronize()
        micro = 1e6 / CALLS
        return {
            "build": (times[1] - times[0]) * micro,
            "submit": (times[2] - times[1]) * micro,
            "replay": (end_s - begin_s) * micro,
        }

    def _chain(self, queries: mx.array) -> mx.array:
        for _ in range(CALLS):
            queries = self._call(queries)
        return queries

    def _call(self, queries: mx.array) -> mx.array:
        return self._backend.attend(
            self._pool, self._plan, queries, scale=128**-0.5, window=None, sinks=None
        )


if __name__ == "__main__":
    sys.exit(main())
