"""Rows with proposals in models with states: one group, and the states before each proposal.

Whatever runs beside it, a row with proposals gives the log-probabilities of its tokens one by one,
and each state that is kept of it is the state after as many tokens, from which the sequence goes on
as if the refused proposals had never run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.path_choice import checked_length
from mlx_parallm.worker.generation.load.proposal_check import (
    ProposalChoice,
    choose_proposals,
)
from mlx_parallm.worker.generation.load.self_check import random_texts, row_of
from mlx_parallm.worker.generation.paths.split import SplitPath
from mlx_parallm.worker.generation.state_store import States, UnknownStateError
from mlx_parallm.worker.generation.step_rows import token_array
from mlx_parallm.worker.layers import kept_states
from mlx_parallm.worker.layers.kept_states import RecurrenceSeam, StateNotes, StateSource
from tests.builders.architectures.configs import config_of
from tests.builders.architectures.trial import BLOCK_SIZE, build, choose
from tests.compiled_attention import CompiledAttention
from tests.integration.test_states import STATEFUL
from tests.unit.worker.generation.test_rebuilt_rows import SPEC

#: REPLAYED: architectures whose layers compute states by code of their own: RWKV, Mamba 1, RG-LRU,
#: shifted keys, and the latest token ids. Accepted tokens run again in these.
REPLAYED = {"baichuan_m1", "jamba", "longcat_flash_ngram", "mamba", "recurrent_gemma", "rwkv7"}
KEEPING = [name for name in STATEFUL if name not in REPLAYED]
#: SOME kinds of layer: a gated delta net, three of its convolutions, short convolutions, gated
#: linear attention. Mamba 2 beside attention and split attention take as long as all of them.
SOME = ("qwen3_5", "olmo_hybrid", "lfm2", "bailing_moe_linear")
#: FEW where MLX compiles kernels for each.
FEW = ("qwen3_5", "lfm2")


def first_some(names: Sequence[str], *options: object, quick: Sequence[str] = SOME) -> list[Any]:
    """Return parameters of tests for architectures; those that are not ``quick`` are slow."""
    marks = {name: () if name in quick else pytest.mark.slow for name in names}
    return [pytest.param(name, *options, marks=mark) for name, mark in marks.items()]


#: STARTS and lengths of rows with proposals; two of them have one length.
ROWS = ((9, 5), (14, 5), (21, 3))
# KEPT_SLOT is the first of the slots for kept states.
KEPT_SLOT = 50


class Steps:
    """Runs steps of texts by a path."""

    def __init__(self, name: str, attention: type[ReferenceAttention] = ReferenceAttention) -> None:
        self.config = config_of(name)
        self.model = build(self.config)
        path = choose(self.model, self.config, attention=attention).path
        assert isinstance(path, SplitPath)
        self.path = path
        self.texts = [text * 2 for text in random_texts(self.config["vocab_size"], None)]

    def choose(self) -> ProposalChoice:
        return choose_proposals(
            self.path,
            vocab_size=self.config["vocab_size"],
            window=checked_length(self.model, probe_layout(self.model)),
            block_size=BLOCK_SIZE,
            dtype="float32",
        )

    def row(self, number: int, start: int, end: int, num_proposals: int = 0) -> ScheduledSequence:
        text = self.texts[-1 - number % 2]
        row = row_of(text, number, start, end, num_texts=8, block_size=BLOCK_SIZE)
        first = KEPT_SLOT + 10 * number
        return replace(
            row,
            verify=(SPEC,) * num_proposals,
            kept_slots=tuple(range(first, first + num_proposals)),
        )

    def run(
        self, rows: Sequence[ScheduledSequence], copies: Sequence[tuple[int, int]] = ()
    ) -> mx.array:
        """Run a step after copies of states; return the log-probabilities of all its rows."""
        self.path.copy_state(copies)
        tokens = token_array(rows)
        logits = self.path.logits(rows, tokens, range(tokens.size))
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logprobs, self.path.arrays())
        return logprobs

    def prefill(self) -> None:
        """Compute what precedes ``ROWS``, each in the slot of its number."""
        for number, (start, _) in enumerate(ROWS):
            self.run([self.row(number, 0, start)])

    def verify(self, *others: ScheduledSequence) -> list[mx.array]:
        """Run ``ROWS`` as one step with others before; return the log-probabilities of each."""
        rows = [
            self.row(number, start, start + size, size - 1)
            for number, (start, size) in enumerate(ROWS)
        ]
        logprobs, first = self.run([*others, *rows]), sum(len(row.token_ids) for row in others)
        parts = []
        for row in rows:
            parts.append(logprobs[first : first + len(row.token_ids)])
            first += len(row.token_ids)
        return parts

    def state(self, slot: int) -> States:
        states = self.path.states.fetch([slot])
        mx.eval(states)
        return states


@cache
def steps_of(name: str) -> Steps:
    return Steps(name)


@cache
def compiled_steps_of(name: str) -> Steps:
    steps = Steps(name, CompiledAttention)
    # The compiled function of decode rows learns from the first of them.
    steps.prefill()
    for number, (start, _) in enumerate(ROWS):
        steps.run([steps.row(number, start, start + 1)])
    return steps


@cache
def one_by_one(name: str) -> list[list[tuple[mx.array, States]]]:
    """Return the log-probabilities and states after each token of ``ROWS`` and one more."""
    steps = steps_of(name)
    steps.prefill()
    results: list[list[tuple[mx.array, States]]] = []
    for number, (start, size) in enumerate(ROWS):
        results.append([])
        for place in range(start, start + size + 1):
            logprobs = steps.run([steps.row(number, place, place + 1)])
            results[-1].append((logprobs[0], steps.state(number)))
    return results


def assert_close(actual: mx.array, wanted: mx.array) -> None:
    assert actual.shape == wanted.shape
    wide, expected = actual.astype(mx.float32), wanted.astype(mx.float32)
    most = mx.maximum(mx.abs(expected).max(), 1.0)
    assert (mx.abs(wide - expected).max() <= 1e-5 * most).item()


def assert_close_states(actual: States, wanted: States) -> None:
    for entries, expected in zip(actual, wanted, strict=True):
        for pair in zip(entries, expected, strict=True):
            assert_close(*pair)


@pytest.mark.parametrize("name", first_some(STATEFUL))
def test_what_a_model_can_do_is_found_out(name: str) -> None:
    choice = Steps(name).choose()
    assert choice.keeps_states == (name in KEEPING)
    # The state of this one grows with the text at first, so its rows cannot be stacked at all.
    assert choice.batches == (name != "longcat_flash_ngram")


@pytest.mark.parametrize(("name", "batches"), first_some(STATEFUL, True) + first_some(SOME, False))
def test_rows_with_proposals_are_as_tokens_one_by_one(name: str, batches: bool) -> None:
    wanted, steps = one_by_one(name), steps_of(name)
    steps.path.batch_proposals = batches and name != "longcat_flash_ngram"
    steps.path.keeps_states = name in KEEPING
    steps.prefill()
    # Beside them, one sequence decodes and another begins.
    steps.run([steps.row(5, 0, 6)])
    parts = steps.verify(steps.row(5, 6, 7), steps.row(6, 0, 11))
    for number, (_, size) in enumerate(ROWS):
        for index in range(size):
            assert_close(parts[number][index], wanted[number][index][0])
        assert_close_states(steps.state(number), wanted[number][size - 1][1])


@pytest.mark.parametrize(("name", "steps_between"), first_some(KEEPING, 0) + first_some(SOME, 1))
def test_a_kept_state_is_that_before_its_proposal(name: str, steps_between: int) -> None:
    wanted, steps = one_by_one(name), steps_of(name)
    steps.path.batch_proposals = steps.path.keeps_states = True
    for most in range(4):
        steps.prefill()
        steps.verify()
        for _ in range(steps_between):
            steps.run([steps.row(5, 0, 6)])
        accepted = [min((most + number) % 4, size - 2) for number, (_, size) in enumerate(ROWS)]
        copies = [
            (KEPT_SLOT + 10 * number + count, number) for number, count in enumerate(accepted)
        ]
        places = [start + 1 + count for (start, _), count in zip(ROWS, accepted, strict=True)]
        rows = [steps.row(number, place, place + 1) for number, place in enumerate(places)]
        logprobs = steps.run(rows, copies)
        for number, count in enumerate(accepted):
            assert_close(logprobs[number], wanted[number][count + 1][0])
            assert_close_states(steps.state(number), wanted[number][count + 1][1])


#: COMPILED: kept states are taken by rows of several lengths in all of these.
COMPILED = [name for name in KEEPING if name != "bailing_moe_linear"]


@pytest.mark.parametrize("name", first_some(KEEPING, quick=FEW))
def test_steps_are_compiled_where_rows_may_have_several_lengths(name: str) -> None:
    choice = Steps(name, CompiledAttention).choose()
    assert choice == ProposalChoice(batches=True, keeps_states=True, compiles=name in COMPILED)


@pytest.mark.parametrize("name", first_some(COMPILED, quick=FEW))
def test_a_compiled_step_gives_the_same(name: str) -> None:
    wanted, steps = one_by_one(name), compiled_steps_of(name)
    steps.path.batch_proposals = steps.path.keeps_states = True
    steps.path.compiles_proposals = True
    for most in range(3):
        steps.prefill()
        steps.run([steps.row(5, 0, 6)])
        parts = steps.verify(steps.row(5, 6, 7))
        for number, (_, size) in enumerate(ROWS):
            for index in range(size):
                assert_close(parts[number][index], wanted[number][index][0])
        # The last row goes on with all of its proposals, and no state is restored for it.
        accepted = [most, most + 1, ROWS[2][1] - 1]
        copies = [(KEPT_SLOT + 10 * number + accepted[number], number) for number in (0, 1)]
        places = [start + 1 + count for (start, _), count in zip(ROWS, accepted, strict=True)]
        rows = [steps.row(number, place, place + 1) for number, place in enumerate(places)]
        logprobs = steps.run(rows, copies)
        for number, count in enumerate(accepted):
            assert_close(logprobs[number], wanted[number][count + 1][0])
            assert_close_states(steps.state(number), wanted[number][count + 1][1])


@pytest.mark.parametrize("name", ["qwen3_5", "rwkv7", *first_some(sorted(REPLAYED - {"rwkv7"}))])
def test_others_keep_the_state_before_the_row(name: str) -> None:
    wanted, steps = one_by_one(name), steps_of(name)
    steps.path.keeps_states, steps.path.batch_proposals = False, name != "longcat_flash_ngram"
    steps.prefill()
    rows = [
        replace(steps.row(number, start, start + size, size - 1), kept_slots=(KEPT_SLOT + number,))
        for number, (start, size) in enumerate(ROWS)
    ]
    steps.run(rows)
    # Two tokens run again, with proposals behind them.
    rows = [steps.row(number, start, start + 3, 1) for number, (start, _) in enumerate(ROWS)]
    rows = [replace(row, kept_slots=row.kept_slots[:1]) for row in rows]
    logprobs = steps.run(rows, [(KEPT_SLOT + number, number) for number in range(len(ROWS))])
    for number in range(len(ROWS)):
        for index in range(3):
            assert_close(logprobs[3 * number + index], wanted[number][index][0])


def test_kept_states_last_for_two_steps() -> None:
    steps = steps_of("lfm2")
    steps.path.batch_proposals = steps.path.keeps_states = True
    steps.prefill()
    steps.verify()
    for _ in range(2):
        steps.run([steps.row(5, 0, 6)])
    steps.path.copy_state([(KEPT_SLOT, 7)])
    assert steps.path.states.peek(7) is None


def test_a_row_of_nan_spoils_no_other() -> None:
    wanted, steps = one_by_one("qwen3_5"), steps_of("qwen3_5")
    steps.path.batch_proposals = steps.path.keeps_states = True
    steps.prefill()
    spoilt = [[array * mx.nan for array in entries] for entries in steps.state(0)]
    steps.path.states.commit([0], spoilt)
    steps.verify()
    steps.run([steps.row(5, 0, 6)], [(KEPT_SLOT + 10 * number, number) for number in range(3)])
    assert mx.isnan(steps.state(0)[0][1]).any().item()
    for number in (1, 2):
        assert_close_states(steps.state(number), wanted[number][0][1])


# RECURRENT architectures, whose states are those of recurrences.
RECURRENT = ("qwen3_5", "olmo_hybrid", "bailing_moe_linear")


def later(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the state after a number of tokens that is one token late."""
    return lambda *args: original(*args[:-1], args[-1] + 1)


@pytest.mark.parametrize("name", first_some([*RECURRENT, "kimi_linear", "falcon_h1"]))
def test_a_recurrence_that_lies_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrenceSeam, "_after", later(RecurrenceSeam._after))
    assert Steps(name).choose() == ProposalChoice(batches=True, keeps_states=False)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "mamba2"])
def test_a_convolution_that_lies_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    window = kept_states._window

    def one_late(inputs: mx.array, width: int) -> StateSource:
        source = window(inputs, width)
        return replace(source, make=lambda arrays, count: source.make(arrays, max(count - 1, 0)))

    monkeypatch.setattr(kept_states, "_window", one_late)
    assert Steps(name).choose() == ProposalChoice(batches=True, keeps_states=False)


def test_convolutions_of_one_shape_in_another_order_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check it in a model whose three convolutions have one shape."""

    def note(self: StateNotes, inputs: mx.array) -> None:
        if self._is_on:
            self._inputs.insert(0, inputs)

    monkeypatch.setattr(StateNotes, "note_convolution", note)
    assert Steps("kimi_linear").choose() == ProposalChoice(batches=True, keeps_states=False)


def test_a_state_that_is_not_known_is_an_error() -> None:
    """Check it: a model that was believed to keep states must not go on from a wrong one."""
    steps = steps_of("rwkv7")
    steps.path.keeps_states = True
    steps.prefill()
    steps.verify()
    with pytest.raises(UnknownStateError, match="after 1 tokens"):
        steps.path.copy_state([(KEPT_SLOT, 0)])
