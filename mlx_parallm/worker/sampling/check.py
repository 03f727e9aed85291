"""Checks a device's sampling kernels against stock operations, and chooses one of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.kernels import KernelReport, device_language
from mlx_parallm.worker.device.ranks import OTHER_RANK, Ranks, agreed
from mlx_parallm.worker.sampling.kernel_sampling import SamplingKernels, why_unsupported
from mlx_parallm.worker.sampling.row_settings import RowSettings, random_keys
from mlx_parallm.worker.sampling.sampler import categorical
from mlx_parallm.worker.sampling.truncation import truncate

logger = logging.getLogger(__name__)

# Relative tolerance of top-p: rounding of a long sum moves the cut.
TOP_P_ROUNDING = 1e-4
# Absolute tolerance of log-probabilities.
MAX_LOGPROB_ERROR = 1e-3
TOP = 5
REPORT_VOCAB = 32_000
_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=0.6, top_k=20),
    SamplingParams(temperature=1.7, top_k=30, top_p=0.6),
    SamplingParams(temperature=0.9, min_p=0.02, top_p=0.9),
)
# Trial logits: normal ones, from nearly even to very uneven, and coarse ones below a maximum, where
# many tie for it.
_SPREADS = (0.5, 3.0, 10.0)
_STEP = 0.5
_MOST = (10.0, 1.0)


def sampling_report() -> KernelReport:
    """Check the kernels of the default device and report the result."""
    kernels, rejected = choose_sampling(REPORT_VOCAB, mx.bfloat16)
    return KernelReport(backend=kernels.name if kernels else "stock", rejected=rejected)


def choose_sampling(
    vocab: int, dtype: mx.Dtype, chosen: bool | None = None, ranks: Ranks | None = None
) -> tuple[SamplingKernels | None, str | None]:
    """Return the device's kernels if they agree with stock operations; else None and the reason.

    The reason is None if the device has no kernels or ``chosen`` is False.

    Args:
        vocab: the length of a row of logits.
        dtype: dtype of the model's logits. Float32 is checked as well, because masks and penalties
            change logits in it.
        chosen: whether an earlier choice on an equal device took the kernels; None to check them.
        ranks: the processes that must choose alike; None if there is this one alone.
    """
    kernels = device_kernels()
    if kernels is None or chosen is False:
        return None, None
    dtypes = dict.fromkeys((dtype, mx.float32))
    kernels.begin(vocab, dtypes)
    for logits_dtype in dtypes:
        reason = None if chosen else why_not(kernels, vocab, logits_dtype)
        if not chosen and not agreed(ranks, reason is None):
            reason = reason or OTHER_RANK
            logger.warning("sampling kernels are not used: %s", reason)
            return None, reason
        kernels.trust(vocab, logits_dtype)
        _try_greedy(kernels, vocab, logits_dtype)
    return kernels, None


def _try_greedy(kernels: SamplingKernels, vocab: int, dtype: mx.Dtype) -> None:
    """Use the kernel for greedy rows if it is for this device, and agrees with ``argmax``.

    It is checked with an earlier choice, too, which does not say whether it was right, and by each
    rank alone: tokens are the same with it and without.
    """
    if not kernels.has_greedy:
        return
    reason = why_not_greedy(kernels, vocab, dtype)
    if reason is None:
        kernels.trust_greedy(vocab, dtype)
    else:
        logger.warning("the kernel for greedy rows is not used: %s", reason)


def device_kernels() -> SamplingKernels | None:
    """Return the kernels of the default device; None if it has none."""
    language = device_language()
    return None if language is None else SamplingKernels(language)


def why_not(kernels: SamplingKernels, vocab: int, dtype: mx.Dtype) -> str | None:
    """Return why ``draw`` and ``logprobs`` are not used for such logits.

    None if they agree with stock operations.
    """
    reason = why_unsupported(vocab, dtype)
    if reason is not None:
        return reason
    logits = check_logits(vocab, dtype)
    specs = [
        SampleSpec(params=params, seed=row, position=7, prompt_ids=(), output_ids=())
        for row, params in enumerate(_PARAMS * (len(_SPREADS) + len(_MOST)))
    ]
    try:
        return _draws_differ(kernels, logits, specs) or _logprobs_differ(kernels, logits)
    except MODEL_ERRORS as cause:
        return f"{type(cause).__name__}: {cause}"


def why_not_greedy(kernels: SamplingKernels, vocab: int, dtype: mx.Dtype) -> str | None:
    """Return why ``greedy`` is not used for such logits; None if it agrees with ``argmax``."""
    try:
        return _largest_differ(kernels, check_logits(vocab, dtype))
    except MODEL_ERRORS as cause:
        return f"{type(cause).__name__}: {cause}"


def check_logits(vocab: int, dtype: mx.Dtype) -> mx.array:
    """Return trial logits: each distribution with each of ``_PARAMS``; a tenth is banned."""
    shape, num_kinds = (len(_PARAMS), vocab), len(_SPREADS) + len(_MOST)
    kinds = [mx.random.normal(shape, key=mx.random.key(i)) for i in range(num_kinds)]
    rows = [kind * spread for kind, spread in zip(kinds, _SPREADS, strict=False)]
    coarse = [mx.round(kind / _STEP) * _STEP for kind in kinds[len(_SPREADS) :]]
    rows += [mx.minimum(kind, most) for kind, most in zip(coarse, _MOST, strict=True)]
    banned = mx.random.uniform(shape=(vocab,), key=mx.random.key(num_kinds)) < 0.1
    return mx.where(banned, -mx.inf, mx.concatenate(rows)).astype(dtype)


def _draws_differ(
    kernels: SamplingKernels, logits: mx.array, specs: Sequence[SampleSpec]
) -> str | None:
    """Return how kept or drawn tokens differ from stock operations; None if they agree."""
    rows = RowSettings(specs)
    tokens, floors = kernels.draw(logits, rows.settings, rows.keys(specs))
    temperatures = [spec.params.temperature for spec in specs]
    greedy = mx.array([temperature == 0.0 for temperature in temperatures])
    divisors = mx.array([temperature or 1.0 for temperature in temperatures])
    scaled = logits.astype(mx.float32) / divisors[:, None]
    kept = (scaled >= floors[:, None]) & (scaled > -mx.inf)
    fewest, most = (
        _kept(scaled, specs, 1 + change) for change in (-TOP_P_ROUNDING, TOP_P_ROUNDING)
    )
    off = np.array(mx.any((fewest & ~kept) | (kept & ~most), axis=-1) & ~greedy)
    if off.any():
        return f"{off.sum()} of {len(specs)} rows keep other tokens"
    drawn = categorical(mx.where(kept, scaled, -mx.inf), random_keys(specs))
    wrong = np.array(mx.where(greedy, mx.argmax(scaled, axis=-1), drawn) != tokens)
    return f"{wrong.sum()} of {len(specs)} rows draw another token" if wrong.any() else None


def _largest_differ(kernels: SamplingKernels, logits: mx.array) -> str | None:
    """Return how the tokens with the largest logits differ from MLX's; None if they agree.

    Two rows are added whose largest logit is the last one, and the first one.
    """
    vocab = logits.shape[-1]
    ends = mx.stack([mx.arange(vocab) == place for place in (vocab - 1, 0)])
    logits = mx.concatenate([logits, ends.astype(logits.dtype)])
    wrong = np.array(kernels.greedy(logits) != mx.argmax(logits, axis=-1))
    return f"{wrong.sum()} of {len(wrong)} rows have another largest logit" if wrong.any() else None


def _kept(scaled: mx.array, specs: Sequence[SampleSpec], change: float) -> mx.array:
    """Return which tokens stock operations keep, with each top-p below 1 times ``change``.

    Rows of equal parameters are truncated together: with mixed rows, MLX's CUDA backend would
    compile kernels that gather and scatter rows.
    """
    params = [
        replace(row, top_p=row.top_p * change) if row.top_p < 1 else row
        for row in (spec.params for spec in specs)
    ]
    kinds = len(_PARAMS)
    parts = [truncate(scaled[kind::kinds], params[kind::kinds]) for kind in range(kinds)]
    return mx.stack(parts, axis=1).reshape(scaled.shape) > -mx.inf


def _logprobs_differ(kernels: SamplingKernels, logits: mx.array) -> str | None:
    """Return how log-probabilities differ from NumPy's; None if they agree."""
    rows, vocab = logits.shape
    targets = np.arange(rows) * 3 % vocab
    wanted = mx.array(np.array([(row, TOP) for row in range(rows)], np.int32))
    reported = kernels.logprobs(logits, mx.array(targets, mx.uint32), wanted, TOP)
    if reported.top_ids is None or reported.top is None:
        return "no likeliest tokens"
    whole = np.array(logits.astype(mx.float32))
    top_ids = np.array([_likeliest(row) for row in whole])
    if not np.array_equal(np.array(reported.top_ids), top_ids):
        return "other tokens are the likeliest"
    # A banned target has a log-probability of minus infinity.
    for values, ids in ((reported.target, targets[:, None]), (reported.top, top_ids)):
        right = _logprobs(whole, ids).reshape(values.shape)
        if not np.allclose(np.array(values), right, rtol=0, atol=MAX_LOGPROB_ERROR):
            return "log-probabilities differ"
    return None


def _logprobs(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of tokens ``ids``, ``[rows, n]``, in float64."""
    largest = logits.max(axis=-1, keepdims=True)
    total = np.exp(logits - largest).sum(axis=-1, dtype=np.float64, keepdims=True)
    return np.take_along_axis(logits, ids, axis=-1) - largest - np.log(total)


def _likeliest(row: np.ndarray) -> np.ndarray:
    """Return the ids of the ``TOP`` largest entries, the earlier of equal ones.

    Stock operations may choose other ones among equals.
    """
    ids = np.flatnonzero(row >= np.partition(row, -TOP)[-TOP])
    return ids[np.argsort(-row[ids], kind="stable")][:TOP]
