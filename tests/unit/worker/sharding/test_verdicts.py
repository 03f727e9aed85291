"""Verdicts at load: what another rank finds wrong, this one does not use either."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.device.kernel_trial import KernelTrials
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.inputs.rows import find_embedding
from mlx_parallm.worker.generation.load.path_choice import ALONE, choose_path
from mlx_parallm.worker.generation.row_selection import install_row_selection
from mlx_parallm.worker.ops import at_once
from mlx_parallm.worker.weights.loader import CastRule
from tests.builders.architectures.configs import VOCAB_SIZE, config_of
from tests.builders.architectures.trial import build


class Verdicts(Ranks):
    """A rank beside one that finds a number of things wrong that are right on this one."""

    def __init__(self, *, num_refused: int) -> None:
        super().__init__(rank=0, size=2, backend="any", group=mx.distributed.init())
        object.__setattr__(self, "own", [])
        object.__setattr__(self, "num_refused", num_refused)

    own: list[bool]
    num_refused: int

    def agree(self, verdict: bool) -> bool:
        """Return the verdict of both ranks."""
        self.own.append(verdict)
        return verdict and sum(self.own) > self.num_refused


def test_a_path_is_used_if_all_ranks_find_it_right() -> None:
    model = build(config_of("llama"))
    # The other rank refuses the head's rows and the packed path.
    ranks = Verdicts(num_refused=2)
    choice = at_once(choose_path)(
        model,
        probe_layout(model),
        ReferenceAttention(4),
        vocab_size=VOCAB_SIZE,
        num_blocks=64,
        block_size=4,
        dtype="float32",
        ranks=ranks,
    )
    assert [(attempt.path, attempt.agrees) for attempt in choice.attempts] == [
        ("packed", False),
        ("split", True),
    ]
    assert not choice.selector.active
    assert sum(ranks.own) == 3


def test_a_model_runs_alone_if_ranks_agree_on_no_path() -> None:
    model = build(config_of("llama"))
    choice = at_once(choose_path)(
        model,
        probe_layout(model),
        ReferenceAttention(4),
        vocab_size=VOCAB_SIZE,
        num_blocks=64,
        block_size=4,
        dtype="float32",
        ranks=Verdicts(num_refused=99),
    )
    assert choice.name == ALONE


def test_rows_of_the_head_are_selected_if_all_ranks_find_them_right() -> None:
    model = build(config_of("llama"))
    assert not install_row_selection(model, VOCAB_SIZE, Verdicts(num_refused=1)).active
    assert install_row_selection(model, VOCAB_SIZE, Verdicts(num_refused=0)).active


def test_rows_replace_tokens_if_all_ranks_find_them_right() -> None:
    model = build(config_of("llama"))
    assert find_embedding(model, VOCAB_SIZE, mx.float32, None, Verdicts(num_refused=1)) is None
    assert find_embedding(model, VOCAB_SIZE, mx.float32, None, Verdicts(num_refused=0)) is not None


def test_a_kernel_is_used_if_all_ranks_find_it_right() -> None:
    ranks = Verdicts(num_refused=1)
    trials = KernelTrials(ranks=ranks)
    trial = trials.of("the kernel is")
    answers = [trial.agree(shape, lambda: None) for shape in (1, 1, 2, 2)]
    assert answers == [False, False, True, True]
    assert not trial.agree(3, lambda: "wrong")
    # Each shape is asked once, on every rank.
    assert ranks.own == [True, True, False]
    assert list(trials.found.values()) == [False, True, False]


def test_weights_are_cast_if_they_fit_on_all_ranks() -> None:
    assert not CastRule(ranks=Verdicts(num_refused=1)).applies(100)
    assert CastRule(ranks=Verdicts(num_refused=0)).applies(100)
    # Each rank has its share of the weights.
    assert CastRule(free_bytes=101, ranks=Verdicts(num_refused=0)).applies(100)
    assert not CastRule(free_bytes=101).applies(100)
