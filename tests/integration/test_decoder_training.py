"""Perturbed forwards of generation models, which continue prompts, against transformers' logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.decoder_classes import decoder_classes
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.training import (
    BranchedText,
    ChoiceInput,
    Distribution,
    Segment,
    Step,
    TrainableSpec,
    num_tokens,
)
from mlx_parallm.worker.generation.row_selection import (
    RowSelector,
    install_row_selection,
    vocab_size_of,
)
from mlx_parallm.worker.generation.stock_forward import StockModel
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers, product_dtype
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.training.sessions import TrainingSessions
from mlx_parallm.worker.training.trained_decoder import TrainedDecoder
from mlx_parallm.worker.training_ops import (
    ApplySteps,
    Materialise,
    MeasureInputs,
    OpenTraining,
    PairForward,
)
from mlx_parallm.worker.weights.loader import LoadedModel, load_model
from tests.builders.random_models import SHAPES, random_model
from tests.decoder_folders import read_generator
from tests.encoder_folders import write_golden

NAMES = ["gpt2", "opt_125m", "opt_350m", "opt_plain"]
MODEL, SESSION = "model", "session"
# TARGETS: linear layers of each architecture.
TARGETS = {"gpt2": ("c_attn", "c_fc"), "opt": ("q_proj", "fc1")}
EPSILON = 0.05
# END: tokens that are predicted of each golden text, the shortest of which has three.
END = 2


def stock_of(loaded: LoadedModel, selector: RowSelector) -> StockModel:
    context = AdapterContext()
    layers = AdaptedLayers(loaded.model, product_dtype(loaded.dtype), context)
    return StockModel(loaded.model, selector, context, layers, 64)


class Trained:
    """A golden generator with one open session."""

    def __init__(self, folder: Path, name: str, *, selects: bool = True, **spec: Any) -> None:
        self.golden = read_generator(name)
        loaded = load_model(ModelConfig(), write_golden(folder, self.golden))
        selector = RowSelector()
        if selects:
            selector = install_row_selection(loaded.model, vocab_size_of(loaded))
            assert selector.active
        stock = stock_of(loaded, selector)
        self.sessions = TrainingSessions(TrainedDecoder(stock))
        self.spec = TrainableSpec(
            **{"targets": TARGETS[name[:4].rstrip("_")], "rank": 2, "alpha": 4.0, **spec}
        )

    def open(self, samples: Sequence[ChoiceInput], **options: Any) -> Any:
        return self.sessions.begin(
            OpenTraining(
                model=MODEL,
                session=SESSION,
                spec=self.spec,
                distribution=Distribution.RADEMACHER,
                samples=samples,
                **options,
            )
        ).wait()

    def forward(
        self, inputs: Sequence[ChoiceInput], segments: Sequence[tuple[int | None, int]]
    ) -> list[np.ndarray]:
        rows = tuple(range(len(inputs)))
        op = PairForward(
            model=MODEL,
            session=SESSION,
            inputs=inputs,
            segments=[Segment(direction, sign, rows) for direction, sign in segments],
            seed=11,
            num_directions=1,
            epsilon=EPSILON,
        )
        return self.sessions.begin(op).wait().results

    def inputs(self, choices: Sequence[Sequence[int]], **changes: Any) -> list[ChoiceInput]:
        """Return the golden texts but their last tokens, with these choices."""
        own = tuple(tuple(choice) for choice in choices)
        texts = self.golden["inputs"]["input_ids"]
        return [ChoiceInput(tuple(ids[:-END]), own, **changes) for ids in texts]


def logprobs_of(golden: dict[str, Any], row: int) -> np.ndarray:
    """Return transformers' log-probabilities ``[tokens, vocabulary]`` of a golden text."""
    logits = np.array(golden["logits"][row])
    most = logits.max(axis=-1, keepdims=True)
    return logits - most - np.log(np.exp(logits - most).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_those_of_transformers(
    tmp_path: Path, name: str, selects: bool
) -> None:
    trained = Trained(tmp_path, name, selects=selects)
    texts = trained.golden["inputs"]["input_ids"]
    words = trained.inputs([[5], [9], [7]])
    # Each text's own last tokens, and others that begin like them.
    ends = [ChoiceInput(tuple(ids[:-END]), (tuple(ids[-END:]), (ids[-END], 4))) for ids in texts]
    means = [ChoiceInput(item.token_ids, item.choices[:1], averages=True) for item in ends]
    trained.open(words)
    read = {kind: trained.forward(kind, [(None, 1)]) for kind in (tuple(words), tuple(ends))}
    mean_results = trained.forward(means, [(None, 1)])
    for row, ids in enumerate(texts):
        logprobs, last = logprobs_of(trained.golden, row), len(ids) - END - 1
        expected = logprobs[last, [5, 9, 7]]
        np.testing.assert_allclose(read[tuple(words)][row], expected, atol=1e-4)
        of_tokens = [logprobs[last + place, ids[last + 1 + place]] for place in range(END)]
        other = logprobs[last, ids[-END]] + logprobs[last + 1, 4]
        np.testing.assert_allclose(read[tuple(ends)][row], [sum(of_tokens), other], atol=1e-4)
        np.testing.assert_allclose(mean_results[row], [np.mean(of_tokens)], atol=1e-4)


@pytest.mark.parametrize("choices", [[[5], [9]], [[5, 6], [9, 3]], [[5, 6, 8]]])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers", [None, (1,)])
def test_pairs_equal_each_sign_alone(
    tmp_path: Path, name: str, choices: list[list[int]], layers: tuple[int, ...] | None
) -> None:
    trained = Trained(tmp_path, name, layers=layers)
    inputs = trained.inputs(choices)
    info = trained.open(inputs[:1])
    assert info.keeps_prefix is (layers is not None)
    trained.sessions.begin(ApplySteps(model=MODEL, session=SESSION, steps=[Step(3, [0.5])])).wait()
    both = trained.forward(inputs, [(0, 1), (0, -1)])
    apart = [
        result
        for sign in (1, -1)
        for item in inputs
        for result in trained.forward([item], [(0, sign)])
    ]
    np.testing.assert_allclose(both, apart, atol=1e-5, rtol=1e-6)
    half = len(inputs)
    assert np.abs(np.array(both[:half]) - np.array(both[half:])).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers", [None, (1,)])
def test_choices_that_share_a_prompt_have_the_same_likelihood(
    tmp_path: Path, name: str, layers: tuple[int, ...] | None
) -> None:
    trained = Trained(tmp_path, name, layers=layers)
    apart = trained.inputs([[5, 6], [9], [5, 3, 8]])
    shared = [replace(item, shares=True) for item in apart]
    assert trained.open(shared).shares_prompts
    signs = [(0, 1), (0, -1), (None, 1)]
    expected = trained.forward(apart, signs)
    np.testing.assert_allclose(trained.forward(shared, signs), expected, atol=1e-5, rtol=1e-6)
    assert np.ptp(expected, axis=0).max() > 1e-3


@cache
def llama_like() -> TrainedDecoder:
    loaded = random_model("tiny", dtype=mx.float32).loaded
    selector = install_row_selection(loaded.model, vocab_size_of(loaded))
    return TrainedDecoder(stock_of(loaded, selector))


PROMPTS = st.lists(st.integers(0, 63), min_size=1, max_size=9).map(tuple)
CHOICES = st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=4).map(tuple), min_size=2)


@given(st.lists(PROMPTS, min_size=1, max_size=4), CHOICES.map(tuple), st.booleans())
@settings(max_examples=40, deadline=None)
def test_ragged_prompts_are_shared_by_ragged_choices(
    prompts: list[tuple[int, ...]], choices: tuple[tuple[int, ...], ...], averages: bool
) -> None:
    model = llama_like()
    apart = [ChoiceInput(prompt, choices, averages) for prompt in prompts]
    shared = [replace(item, shares=True) for item in apart]
    has_one_token = all(len(choice) == 1 for choice in choices)
    lengths = [len(prompt) + sum(len(choice) - 1 for choice in choices) for prompt in prompts]
    assert [num_tokens(item) for item in shared] == lengths
    if not has_one_token:
        assert [type(text) for item in shared for text in model.texts(item)] == [
            BranchedText for _ in prompts
        ]
    results = [model.changed_job(items, {}).wait() for items in (apart, shared)]
    np.testing.assert_allclose(results[1], results[0], atol=2e-5)


def test_a_model_with_windows_shares_no_prompt() -> None:
    config = SHAPES["tiny"] | {
        "model_type": "gemma3_text",
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 1e4,
    }
    model_class, args_class = decoder_classes(dict(config))
    model = model_class(args_class.from_dict(config))
    loaded = LoadedModel(model, config, Path("windows"), "float32", 0)
    decoder = TrainedDecoder(stock_of(loaded, RowSelector()))
    assert not decoder.shares_prompts
    item = ChoiceInput((1, 2, 3), ((4, 5), (6, 7)), shares=True)
    assert [text.token_ids for text in decoder.texts(item)] == [(1, 2, 3, 4), (1, 2, 3, 6)]


def test_the_adapter_is_what_was_trained(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "opt_125m")
    inputs = trained.inputs([[5], [9]])
    trained.open(inputs)
    before = trained.forward(inputs, [(None, 1)])
    steps = [Step(seed, [0.3]) for seed in range(4)]
    trained.sessions.begin(ApplySteps(model=MODEL, session=SESSION, steps=steps)).wait()
    after = trained.forward(inputs, [(None, 1)])
    assert np.abs(np.array(after) - np.array(before)).max() > 1e-3
    adapter = trained.sessions.begin(Materialise(model=MODEL, session=SESSION, steps=steps)).wait()
    assert {path.rsplit(".", 1)[1] for path in adapter.modules} == {"q_proj", "fc1"}


@pytest.mark.parametrize("choices", [[[5], [9]], [[5, 6], [9, 3]]])
@pytest.mark.parametrize("name", NAMES)
def test_first_factors_are_measured_on_prompts(
    tmp_path: Path, name: str, choices: list[list[int]]
) -> None:
    trained = Trained(tmp_path, name)
    inputs = trained.inputs(choices)
    op = MeasureInputs(model=MODEL, session=SESSION, spec=trained.spec, inputs=inputs)
    factors = trained.sessions.begin(op).wait()
    info = trained.open(inputs[:1], factors=factors)
    assert set(factors) == set(info.paths)
    assert all(np.isfinite(array).all() and array.any(axis=1).all() for array in factors.values())
    trained.sessions.begin(ApplySteps(model=MODEL, session=SESSION, steps=[Step(3, [0.1])])).wait()
    both = trained.forward(inputs, [(0, 1), (0, -1)])
    alone = [trained.forward([item], [(0, 1)])[0] for item in inputs]
    np.testing.assert_allclose(both[: len(inputs)], alone, atol=1e-5, rtol=1e-6)


def test_a_model_that_reads_padding_is_refused(tmp_path: Path) -> None:
    loaded = load_model(ModelConfig(), write_golden(tmp_path, read_generator("opt_125m")))

    class Both(type(loaded.model)):
        def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
            return super().__call__(ids, cache) * (1 + mx.sum(ids == 0))

    loaded.model.__class__ = Both
    stock = stock_of(loaded, RowSelector())
    with pytest.raises(InvalidRequestError, match="depend on those after them"):
        TrainedDecoder(stock)
