"""The sampling kernels' texts, run on the CPU, keep, draw and report what stock MLX does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.types.request import (
    ADJUSTED_LOGPROBS,
    LOGPROBS_MODES,
    PROCESSED_LOGPROBS,
    SamplingParams,
)
from mlx_parallm.types.step import SampleSpec
from mlx_parallm.worker.sampling import check as sampling_check
from mlx_parallm.worker.sampling import truncation
from mlx_parallm.worker.sampling.check import (
    choose_sampling,
    sampling_report,
    why_not,
    why_not_greedy,
)
from mlx_parallm.worker.sampling.kernel_sampling import MAX_TOP, SamplingKernels
from mlx_parallm.worker.sampling.logprobs import LEAST
from mlx_parallm.worker.sampling.row_settings import RowSettings, random_keys
from mlx_parallm.worker.sampling.sampler import Sampler, categorical
from mlx_parallm.worker.sampling.truncation import Stage, settings_in_use, truncate
from tests.kernels.sampling_trial import (
    DTYPES,
    THREADS,
    TRUNCATIONS,
    VOCAB,
    drawn,
    spec,
    tokens_of,
    trusted,
    values_of,
)
from tests.kernels.shim_language import ORDERS, CudaShim, Shim

pytestmark = pytest.mark.slow

#: ``ROUNDING`` of probabilities: the rounding of sums decides where top-p ends.
ROUNDING = 1e-5
KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda source, vocab: source.normal(size=vocab) * 3,
    "coarse": lambda source, vocab: np.round(source.normal(size=vocab)),
    "equal": lambda _, vocab: np.full(vocab, -3.25),
    "one": lambda _, vocab: np.where(np.arange(vocab) == vocab // 3, 400.0, -400.0),
    "banned": lambda source, vocab: np.where(
        source.random(vocab) < 0.99, -np.inf, source.normal(size=vocab)
    ),
    "huge": lambda source, vocab: source.normal(size=vocab) * 1e4 - 5e4,
    "zeros": lambda source, vocab: np.where(source.random(vocab) < 0.5, -0.0, 0.0),
    "tiny": lambda source, vocab: source.normal(size=vocab) * 1e-7,
    "neighbours": lambda source, vocab: 7 + source.integers(0, 40, vocab) * 2.0**-21,
}


def kept_in_theory(row: np.ndarray, params: SamplingParams, top_p: float) -> np.ndarray:
    """Return what top-p keeps in float64 of what min-p and top-k leave."""
    before = truncate(mx.array(row[None]), [SamplingParams(top_k=params.top_k, min_p=params.min_p)])
    keep = np.isfinite(np.array(before)[0])
    ids = np.argsort(-row, kind="stable")
    ids = ids[keep[ids]][: params.top_k if params.top_k > 0 else None]
    mass = np.exp(row[ids].astype(np.float64) - row.max())
    above = np.cumsum(mass) - mass
    inside = ids[above < top_p * mass.sum()]
    return keep & (row >= row[inside].min())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "threads"), [(33, 32), (1111, 64), (2048, 128)])
def test_the_check_at_load_passes(shim: Shim, vocab: int, threads: int, dtype: mx.Dtype) -> None:
    for shim.order in ORDERS:
        kernels = SamplingKernels(shim, threads=threads)
        assert why_not(kernels, vocab, dtype) is None
        assert why_not_greedy(kernels, vocab, dtype) is None


@pytest.mark.parametrize("temperature", [1e-5, 0.7, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_and_drawn_is_what_stock_operations_keep_and_draw(
    shim: Shim, kind: str, temperature: float
) -> None:
    kernels = SamplingKernels(shim, threads=THREADS)
    source = np.random.default_rng(len(kind))
    specs = [spec(i, temperature=temperature, **options) for i, options in enumerate(TRUNCATIONS)]
    params = [row_spec.params for row_spec in specs]
    logits = mx.array(np.array([KINDS[kind](source, VOCAB) for _ in specs], dtype=np.float32))
    scaled = logits / temperature
    tokens, floors = drawn(kernels, logits, specs)
    kept = np.array((scaled >= floors) & (scaled > -mx.inf))
    stock = np.array(truncate(scaled, params) > -mx.inf)
    for mine, theirs, row, row_params in zip(kept, stock, np.array(scaled), params, strict=True):
        if row_params.top_p == 1:
            assert (mine == theirs).all(), row_params
        else:
            fewest = kept_in_theory(row, row_params, row_params.top_p * (1 - ROUNDING))
            most = kept_in_theory(row, row_params, row_params.top_p * (1 + ROUNDING))
            assert (mine >= fewest).all(), row_params
            assert (mine <= most).all(), row_params
    wanted = categorical(mx.where(mx.array(kept), scaled, -mx.inf), random_keys(specs))
    assert tokens == np.array(wanted).tolist()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_short_numbers_are_kept_as_long_ones(shim: Shim, dtype: mx.Dtype) -> None:
    kernels = SamplingKernels(shim, threads=THREADS)
    source = np.random.default_rng(5)
    specs = [spec(i, **options) for i, options in enumerate(TRUNCATIONS)]
    logits = mx.array(source.normal(size=(len(specs), VOCAB)) * 3).astype(dtype)
    tokens, floors = drawn(kernels, logits, specs)
    long_tokens, long_floors = drawn(kernels, logits.astype(mx.float32), specs)
    assert tokens == long_tokens
    scaled = logits.astype(mx.float32)
    assert mx.array_equal(scaled >= floors, scaled >= long_floors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "threads"), [(33, 32), (600, 64), (1111, 64), (2048, 128)])
def test_the_largest_is_the_first_of_those_that_tie(
    shim: Shim, vocab: int, threads: int, dtype: mx.Dtype
) -> None:
    source = np.random.default_rng(vocab)
    rows = [KINDS[kind](source, vocab) for kind in KINDS if kind != "huge"]
    rows += [np.full(vocab, -np.inf), np.where(np.arange(vocab) == vocab - 1, 1.0, 0.0)]
    logits = mx.array(np.array(rows, np.float32)).astype(dtype)
    expected = np.array(logits.astype(mx.float32)).argmax(axis=-1).tolist()
    for shim.order in ORDERS:
        assert SamplingKernels(shim, threads=threads).greedy(logits).tolist() == expected


def test_rows_draw_the_same_alone_together_and_again(shim: Shim) -> None:
    kernels = SamplingKernels(shim, threads=THREADS)
    source = np.random.default_rng(6)
    specs = [spec(i, i * i, temperature=0.9, **options) for i, options in enumerate(TRUNCATIONS)]
    specs[4] = spec(4, temperature=0.0)
    logits = mx.array(source.normal(size=(len(specs), VOCAB)), dtype=mx.float32)
    together, floors = drawn(kernels, logits, specs)
    for shim.order in ORDERS:
        assert drawn(kernels, logits, specs)[0] == together
    for row, row_spec in enumerate(specs):
        alone, floor = drawn(kernels, logits[row : row + 1], [row_spec])
        assert alone == together[row : row + 1]
        assert floor.item() == floors[row].item()


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf")])
def test_rows_that_mean_nothing_still_draw_a_token(shim: Shim, value: float) -> None:
    kernels = SamplingKernels(shim, threads=THREADS)
    truncations: list[dict[str, Any]] = [*TRUNCATIONS, {"temperature": 0.0}]
    specs = [spec(i, **options) for i, options in enumerate(truncations)]
    tokens, _ = drawn(kernels, mx.full((len(specs), 96), value), specs)
    assert all(0 <= token < 96 for token in tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top", [0, 1, 20, MAX_TOP])
def test_the_likeliest_come_best_first_and_ties_by_ascending_id(
    shim: Shim, kind: str, top: int
) -> None:
    source = np.random.default_rng(top)
    logits = np.array([KINDS[kind](source, VOCAB) for _ in range(4)], dtype=np.float32)
    chosen, tokens = [3, 1], np.array([9, 8, 7, 6], dtype=np.uint32)
    wanted = mx.array([(row, top) for row in chosen], dtype=mx.int32)
    kernels = SamplingKernels(shim, threads=THREADS)
    actual = kernels.logprobs(mx.array(logits), mx.array(tokens), wanted, top)
    for row, entry in zip(chosen, actual.to_python(), strict=True):
        exact = logits[row].astype(np.float64)
        exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
        # Tokens that cannot be sampled are not reported; such a target has the least number.
        ids = np.argsort(-logits[row], kind="stable")[:top].tolist()
        ids = [token for token in ids if exact[token] > -np.inf]
        assert entry.token_id == tokens[row]
        assert np.isclose(entry.logprob, max(exact[tokens[row]], LEAST), rtol=1e-6, atol=1e-5)
        assert [token for token, _ in entry.top] == ids
        assert np.allclose([value for _, value in entry.top], exact[ids], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("mode", [*LOGPROBS_MODES, ADJUSTED_LOGPROBS])
def test_a_sampler_answers_the_same_with_kernels_and_without(shim: Shim, mode: str) -> None:
    source = np.random.default_rng(8)
    mine = Sampler(trusted(shim, mx.float32), logprobs_mode=mode)
    stock = Sampler(logprobs_mode=mode)
    params = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(top_k=7, presence_penalty=1.0),
        SamplingParams(top_k=50, min_p=0.01, logprobs=0, entropy=True),
        SamplingParams(logit_bias=((5, 4.0),), temperature=2.0, logprobs=4),
        SamplingParams(top_k=3, temperature=0.5, logprobs=20, entropy=True),
    ]
    for step in range(4):
        specs = [
            SampleSpec(
                params=options,
                seed=row + (step == 3),
                position=step,
                prompt_ids=(1, 2),
                output_ids=[3, 4],
                banned_ids=(6,) if step == 2 else (),
            )
            for row, options in enumerate(params)
        ]
        if step == 1:
            specs = specs[1:]
        logits = mx.array(source.normal(size=(len(specs), VOCAB)) * 2, dtype=mx.float32)
        actual, wanted = mine(logits, specs), stock(logits, specs)
        assert tokens_of(actual, len(specs)) == tokens_of(wanted, len(specs))
        pairs = zip(values_of(actual, len(specs)), values_of(wanted, len(specs)), strict=True)
        for some, others in pairs:
            assert some == pytest.approx(others, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1e-5, 0.7, 3.0])
def test_processed_logprobs_are_those_of_what_the_kernels_kept(
    shim: Shim, kind: str, temperature: float
) -> None:
    source = np.random.default_rng(len(kind))
    params: dict[str, Any] = {
        "temperature": temperature,
        "logprobs": 3,
        "logprobs_mode": PROCESSED_LOGPROBS,
    }
    specs = [spec(i, **params, **options) for i, options in enumerate(TRUNCATIONS)]
    logits = mx.array(np.array([KINDS[kind](source, VOCAB) for _ in specs], dtype=np.float32))
    kernels = trusted(shim, mx.float32)
    tokens, floors = drawn(kernels, logits, specs)
    scaled = logits / temperature
    exact = np.array(mx.where(scaled >= floors, scaled, -mx.inf)).astype(np.float64)
    exact -= exact.max(axis=-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    result = Sampler(kernels)(logits, specs)
    for row, token in enumerate(result.to_python(range(len(specs)))):
        assert token.token_id == tokens[row]
        assert token.logprob is not None
        assert token.logprob.logprob == pytest.approx(exact[row, tokens[row]], rel=1e-6, abs=1e-5)
        best = np.sort(exact[row][exact[row] > -np.inf])[::-1][:3]
        assert [value for _, value in token.logprob.top] == pytest.approx(best, rel=1e-6, abs=1e-5)


class CountingShim(CudaShim):
    """Records which kernels ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def _call(self, text: object, **options: object) -> list[mx.array]:  # pyright: ignore
        self.ran.append(text.name.split("_")[1])  # pyright: ignore
        return super()._call(text, **options)  # pyright: ignore


def test_kernels_run_only_where_they_are_wanted_and_trusted() -> None:
    shim = CountingShim()
    sampler = Sampler(trusted(shim, mx.float32))
    logits = mx.random.normal((2, VOCAB), key=mx.random.key(0))
    greedy, random = spec(temperature=0.0), spec(top_p=0.9)
    cases: list[tuple[mx.array, list[SampleSpec], list[str]]] = [
        (logits, [greedy, greedy], ["greedy"]),
        (logits, [greedy, random], ["draw"]),
        (logits, [greedy, spec(temperature=0.0, logprobs=3)], ["greedy", "logprobs"]),
        (logits, [spec(logprobs=MAX_TOP + 1), random], ["draw"]),
        (logits, [random, spec(top_n_sigma=1.0)], []),
        (logits, [random, spec(top_n_sigma=1.0, temperature=0.0)], ["draw"]),
        (logits.astype(mx.float16), [random, random], []),
        (logits[:, 1:], [random, random], []),
    ]
    for rows, specs, ran in cases:
        mx.eval(sampler(rows, specs).arrays())
        assert shim.ran == ran
        shim.ran.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewParams(SamplingParams):
    """Parameters with a setting that no kernel knows."""

    only_even: bool = False


def drops_odd(params: SamplingParams) -> bool:
    return isinstance(params, NewParams) and params.only_even


def drop_odd(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    rows = mx.array([drops_odd(row) for row in params])
    is_odd = mx.arange(logits.shape[-1]) % 2 == 1
    return mx.where(rows[:, None] & is_odd, -mx.inf, logits)


def test_a_setting_that_the_kernels_do_not_know_takes_the_stock_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(
        ("only_even",), lambda row: isinstance(row, NewParams) and row.only_even, drop_odd
    )
    monkeypatch.setattr(truncation, "STAGES", (*truncation.STAGES, stage))
    shim = CountingShim()
    kernels = trusted(shim, mx.float32)
    logits = mx.random.normal((40, VOCAB), key=mx.random.key(0))
    plain = [spec(row) for row in range(40)]
    evens = [replace(row, params=NewParams(only_even=True)) for row in plain[:20]]
    unused = [replace(row, params=NewParams()) for row in plain]
    whole = Sampler(kernels)(logits, plain)
    assert shim.ran == ["draw"]
    mixed = np.array(Sampler(kernels)(logits, [*evens, *plain[20:]]).tokens)
    assert shim.ran == ["draw"]
    assert (mixed[:20] % 2 == 0).all()
    assert (np.array(whole.tokens[:20]) % 2 == 1).any()
    assert np.array_equal(mixed[20:], np.array(whole.tokens[20:]))
    greedy = [replace(evens[0], params=NewParams(only_even=True, temperature=0.0))]
    Sampler(kernels)(logits, [*greedy, *unused[1:]])
    assert shim.ran == ["draw", "draw"]


def test_kernels_know_the_settings_that_they_are_given() -> None:
    kernels = trusted(CountingShim(), mx.float32)
    logits = mx.zeros((1, VOCAB))
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1)
    settings = settings_in_use([params])
    assert settings == {"temperature", "top_k", "top_p", "min_p"}
    assert kernels.serve(logits, settings)
    assert not kernels.serve(logits, settings | {"only_even"})
    assert settings_in_use([SamplingParams(presence_penalty=1.0)]) == frozenset()


def test_settings_are_made_again_only_when_rows_change() -> None:
    specs = [spec(1, 5, top_p=0.5), spec(2, 9, temperature=0.0, logprobs=2)]
    rows = RowSettings(specs)
    later = [
        replace(row_spec, position=row_spec.position + 1, output_ids=(4,)) for row_spec in specs
    ]
    assert rows.are_of(later)
    assert not rows.are_of(specs[:1])
    assert not rows.are_of(specs[::-1])
    assert not rows.are_of([spec(3, 5, top_p=0.5), specs[1]])
    assert not rows.are_of([spec(1, 5, top_p=0.6), specs[1]])
    for step_specs in (specs, later):
        assert mx.array_equal(rows.keys(step_specs), random_keys(step_specs))
    before = rows.keys(specs)
    rows.keys(later)
    assert mx.array_equal(before, random_keys(specs))


def test_logits_that_kernels_do_not_take_are_sampled_by_stock_operations(
    shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_check, "device_kernels", lambda: SamplingKernels(shim, threads=32))
    assert choose_sampling(MAX_TOP - 1, mx.float32) == (None, f"a vocabulary of {MAX_TOP - 1}")
    assert choose_sampling(VOCAB, mx.int32) == (None, f"logits of {mx.int32}")
    kernels, rejected = choose_sampling(VOCAB, mx.float16)
    assert rejected is None
    assert kernels is not None
    for dtype in (mx.float16, mx.float32):
        assert kernels.serve(mx.zeros((1, VOCAB), dtype))
    assert not kernels.serve(mx.zeros((1, VOCAB), mx.bfloat16))


@pytest.mark.parametrize("chosen", [None, True])
def test_a_wrong_greedy_kernel_leaves_only_greedy_rows_to_stock_operations(
    shim: Shim, monkeypatch: pytest.MonkeyPatch, chosen: bool | None
) -> None:
    monkeypatch.setattr(sampling_check, "device_kernels", lambda: SamplingKernels(shim, threads=32))
    logits = mx.zeros((1, VOCAB))
    right, _ = choose_sampling(VOCAB, mx.float32, chosen)
    assert right is not None
    assert right.serve_greedy(logits) == (shim.name == "cuda")
    tried: list[str] = []

    def spoil(name: str, body: str) -> str:
        tried.append(name)
        return body.replace("best_id = i * VEC + j;", "best_id = 0;") if "greedy" in name else body

    shim.mutate = spoil
    kernels, rejected = choose_sampling(VOCAB, mx.float32, chosen)
    assert rejected is None
    assert kernels is not None
    assert kernels.serve(logits)
    assert not kernels.serve_greedy(logits)
    assert any("greedy" in name for name in tried) == (shim.name == "cuda")


def test_the_report_says_why_kernels_are_not_used(
    shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_check, "REPORT_VOCAB", VOCAB)
    monkeypatch.setattr(sampling_check, "device_kernels", lambda: SamplingKernels(shim, threads=64))
    assert sampling_report() == sampling_check.KernelReport(backend=shim.name)
    shim.mutate = lambda _, body: body.replace("best = score;", "best = -score;")
    report = sampling_report()
    assert report.backend == "stock"
    assert "draw another token" in (report.rejected or "")
