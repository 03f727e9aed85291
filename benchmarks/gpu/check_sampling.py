"""Check the sampling kernels on the GPU at hand, and time them beside stock operations.

``python -m benchmarks.gpu.check_sampling`` compares what is kept, drawn and reported of 1 to 128
rows of 151,936 logits, then prints microseconds of a call of the whole ``Sampler``: of the host
until ``mx.async_eval`` returns, and in all. Exits 1 if anything differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec
from mlx_parallm.worker.sampling.check import device_kernels, why_not, why_not_greedy
from mlx_parallm.worker.sampling.kernel_sampling import SamplingKernels
from mlx_parallm.worker.sampling.logprobs import target_logprobs
from mlx_parallm.worker.sampling.row_settings import RowSettings, random_keys
from mlx_parallm.worker.sampling.sampler import Sampler, categorical
from mlx_parallm.worker.sampling.truncation import truncate

TOP_P: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
GREEDY: dict[str, Any] = {"temperature": 0.0}
#: ``MIXES``: parameters of the rows, which are used in turn.
MIXES: dict[str, list[dict[str, Any]]] = {
    "greedy": [GREEDY],
    "top-p": [TOP_P],
    "top-p, logprobs on a quarter": [TOP_P | {"logprobs": 5}, TOP_P, TOP_P, TOP_P],
    "temperature": [{"temperature": 1.0}],
    "top-k": [{"temperature": 0.8, "top_k": 40}],
    "all": [{"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02}],
    "20 logprobs": [GREEDY | {"logprobs": 20}],
    "mixed": [GREEDY, TOP_P, {"temperature": 1.2, "top_k": 50, "logprobs": 3}],
}
CHECKED = ("top-p", "temperature", "top-k", "mixed")
#: ``SPREADS``: standard deviations of logits, nearly even or as peaked as a model's.
SPREADS = {"even": 0.6, "peaked": 4.0}
ROWS = (64, 1, 8, 128)
TOP = 5
# MAX_SHARE: probability mass that may differ, because running sums round.
MAX_SHARE = 1e-4
MAX_ERROR = 1e-3
CALLS = 8
WIDTHS = (12, 8, 15, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=151_936)
    args = parser.parse_args()
    kernels = device_kernels()
    if kernels is None:
        print("this device has no kernels")
        return 1
    wrong = 0
    for dtype in (mx.bfloat16, mx.float32):
        reason = why_not(kernels, args.vocab, dtype)
        reason = reason or why_not_greedy(kernels, args.vocab, dtype)
        print(f"check at load, {dtype}: {reason or 'passed'}", flush=True)
        wrong += reason is not None
        kernels.trust(args.vocab, dtype)
        kernels.trust_greedy(args.vocab, dtype)
        for rows in sorted(ROWS):
            for name, spread in SPREADS.items():
                logits = _logits(rows, args.vocab, spread, dtype)
                for mix in CHECKED:
                    wrong += not _agrees(kernels, logits, mix, f"{rows} rows, {dtype}, {name}")
    _time(kernels, args.vocab)
    return int(wrong > 0)


def _logits(rows: int, vocab: int, spread: float, dtype: mx.Dtype) -> mx.array:
    logits = (mx.random.normal((rows, vocab), key=mx.random.key(rows)) * spread).astype(dtype)
    mx.eval(logits)
    return logits


def _specs(mix: str, rows: int, position: int = 100) -> list[SampleSpec]:
    kinds = MIXES[mix]
    return [
        SampleSpec(
            params=SamplingParams(**kinds[row % len(kinds)]),
            seed=row,
            position=position,
            prompt_ids=(),
            output_ids=(),
        )
        for row in range(rows)
    ]


def _agrees(kernels: SamplingKernels, logits: mx.array, mix: str, what: str) -> bool:
    """True if the kernels keep, draw and report what stock operations do, again and alone too."""
    specs = _specs(mix, logits.shape[0])
    settings, params = RowSettings(specs), [spec.params for spec in specs]
    keys = settings.keys(specs)
    tokens, floors = kernels.draw(logits, settings.settings, keys)
    again, _ = kernels.draw(logits, settings.settings, keys)
    last, _ = kernels.draw(logits[-1:], RowSettings(specs[-1:]).settings, keys[-1:])
    is_drawn = np.array([row.temperature > 0 for row in params])
    temperatures = mx.array([row.temperature or 1.0 for row in params])
    scaled = logits.astype(mx.float32) / temperatures[:, None]
    cut = truncate(scaled, params)
    differs = (cut > -mx.inf) != (scaled >= floors[:, None])
    mass = mx.sum(mx.where(differs, mx.softmax(scaled, axis=-1), 0.0), axis=-1)
    share = float((np.array(mass) * is_drawn).max())
    likeliest = np.array(mx.argmax(logits, axis=-1))
    wanted = np.where(is_drawn, np.array(categorical(cut, random_keys(specs))), likeliest)
    others = int((wanted != np.array(tokens)).sum())
    error = _logprob_error(kernels, logits, tokens)
    repeats = np.array_equal(np.array(tokens), np.array(again))
    is_alone = np.array(last)[0] == np.array(tokens)[-1]
    is_right = share < MAX_SHARE and not others and error < MAX_ERROR and repeats and is_alone
    print(
        f"{'ok' if is_right else 'WRONG':<6}{what}, {mix}: mass kept otherwise {share:.1e}, drawn "
        f"otherwise {others}, log-probabilities off by {error:.1e}, the same again {repeats} and "
        f"alone {is_alone}",
        flush=True,
    )
    return bool(is_right)


def _logprob_error(kernels: SamplingKernels, logits: mx.array, tokens: mx.array) -> float:
    rows = np.array([(row, TOP) for row in range(logits.shape[0])], np.int32)
    actual = kernels.logprobs(logits, tokens, mx.array(rows), TOP)
    stock = target_logprobs(logits, tokens, TOP)
    pairs = ((actual.target, stock.target), (actual.top, stock.top))
    return max(float(np.abs(np.array(ours) - np.array(theirs)).max()) for ours, theirs in pairs)


def _time(kernels: SamplingKernels, vocab: int) -> None:
    print(
        f"\n{'microseconds a call':<46}{'stock: host':>12}{'all':>8}{'kernels: host':>15}{'all':>8}"
    )
    for rows in ROWS:
        for name, spread in SPREADS.items():
            logits = _logits(rows, vocab, spread, mx.bfloat16)
            for mix in MIXES:
                figures: list[float] = []
                for sampler in (Sampler(), Sampler(kernels)):
                    _calls(sampler, logits, mix, 2)
                    figures += _calls(sampler, logits, mix, CALLS)
                cells = "".join(
                    f"{value:>{width}.0f}" for value, width in zip(figures, WIDTHS, strict=True)
                )
                print(f"{f'{rows} rows, {name}, {mix}':<46}{cells}", flush=True)


def _calls(sampler: Sampler, logits: mx.array, mix: str, count: int) -> Sequence[float]:
    """Return the median microseconds, of the host and in all, of calls evaluated one by one."""
    host, total = [], []
    for call in range(count):
        specs = _specs(mix, logits.shape[0], 100 + call)
        mx.synchronize()
        started = time.perf_counter()
        result = sampler(logits, specs)
        mx.async_eval(result.arrays())
        host.append(time.perf_counter() - started)
        mx.eval(result.arrays())
        total.append(time.perf_counter() - started)
    return statistics.median(host) * 1e6, statistics.median(total) * 1e6


if __name__ == "__main__":
    sys.exit(main())
