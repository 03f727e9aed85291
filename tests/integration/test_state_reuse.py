"""Requests that find snapshots get what an engine without a prefix cache gives them.

Tiny models in float32, of every architecture that keeps a state, as docs/models.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.states import listed
from mlx_parallm.config import SpeculativeConfig
from mlx_parallm.generation.scheduler.scheduler import BAD_STATE
from tests.state_sessions import (
    QUANTISED_TOLERANCE,
    Ask,
    StateModel,
    StateSession,
    cold,
    model_of,
    next_turn,
    tokens_from,
)

STATEFUL = listed((Path(__file__).parents[2] / "docs" / "models.md").read_text())
#: FEW architectures have a layer of each kind: gated delta nets, convolutions, Mamba 2 without KV.
FEW = ("qwen3_next", "lfm2", "mamba2")
ARCHITECTURES = [
    pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in STATEFUL
]
every = pytest.mark.parametrize("name", ARCHITECTURES)
#: SYSTEM prompt of whole blocks, and what follows it.
SYSTEM, FIRST, SECOND = tokens_from(1, 32), tokens_from(2, 9), tokens_from(3, 11)
PROMPT = tokens_from(4, 37)
NGRAM = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1, disable_by_batch_size=8)
SAMPLED = {"temperature": 1.0, "n": 2}


def warm(name: str) -> StateModel:
    return model_of(name, "warm", "reference")


@every
def test_second_turn(name: str) -> None:
    assert warm(name).runner.info.path != "alone"
    check_second_turn(name, warm(name))


@pytest.mark.parametrize("backend", ["runs ahead", "compiled"])
@pytest.mark.parametrize("name", FEW)
def test_second_turn_where_steps_run_ahead(name: str, backend: str) -> None:
    check_second_turn(name, model_of(name, "warm", backend))


def check_second_turn(name: str, model: StateModel) -> None:
    session = StateSession(model)
    first = session.ask(Ask(PROMPT))
    assert first.is_like(cold(name, Ask(PROMPT)))
    second = Ask(next_turn(PROMPT, first, seed=5))
    hits = [session.ask(second) for _ in range(3)]
    assert [hit.cached for hit in hits] == [36, 52, 52]
    assert all(hit.is_like(cold(name, second)) for hit in hits)
    assert hits[1] == hits[2]
    # One token is left, which runs as those of answers do.
    again = session.ask(Ask(PROMPT))
    assert again.cached == 36
    assert again.is_like(first)


@every
def test_prompts_that_are_prefilled_together(name: str) -> None:
    """Check that states are of the right rows, where steps have chunks of several prompts."""
    session = StateSession(warm(name), budget=96)
    asks = [Ask(tokens_from(40 + index, length)) for index, length in enumerate((5, 22, 37, 16))]
    for index, ask in enumerate(asks):
        session.begin(f"r{index}", ask)
    session.finish()
    answers = [session.answer(f"r{index}") for index in range(len(asks))]
    turns = [
        Ask(next_turn(ask.prompt, answer, seed=index, count=5))
        for index, (ask, answer) in enumerate(zip(asks, answers, strict=True))
    ]
    for index, ask in enumerate(turns):
        session.begin(f"turn {index}", ask)
    session.finish()
    answers += [session.answer(f"turn {index}") for index in range(len(turns))]
    assert [answer.cached for answer in answers] == [0, 0, 0, 0, 4, 20, 36, 12]
    for ask, answer in zip((*asks, *turns), answers, strict=True):
        assert answer.is_like(cold(name, ask))


@every
def test_second_turn_with_quantised_kv(name: str) -> None:
    """Compare with a server that cuts the prompt as the first hit does, and finds nothing.

    The hits after it have other cuts.
    """
    model = model_of(name, "warm", "int8")
    if not model.runner.info.kv_bytes:
        pytest.skip("it keeps no KV")
    session = StateSession(model)
    second = Ask(next_turn(PROMPT, session.ask(Ask(PROMPT)), seed=5))
    hits = [session.ask(second) for _ in range(3)]
    assert [hit.cached for hit in hits] == [36, 52, 52]
    assert hits[1] == hits[2]
    wanted = StateSession(model).ask(replace(second, fields={"turn_start": 36}))
    assert wanted.cached == 0
    assert hits[0].is_like(wanted, 1e-6)
    assert all(hit.is_like(wanted, QUANTISED_TOLERANCE) for hit in hits)


@every
def test_shared_system_prompt(name: str) -> None:
    session = StateSession(warm(name), snapshot_tokens=1000)
    fields = {"turn_start": len(SYSTEM)}
    cached = []
    for text in (FIRST, SECOND, FIRST):
        ask = Ask((*SYSTEM, *text), fields=fields)
        answer = session.ask(ask)
        assert answer.is_like(cold(name, ask))
        cached.append(answer.cached)
    assert cached == [0, 32, 40]


@every
def test_snapshots_within_a_long_prompt(name: str) -> None:
    session = StateSession(warm(name), budget=16, snapshot_tokens=16)
    session.ask(Ask((*SYSTEM, *FIRST)))
    ask = Ask((*SYSTEM[:20], *SECOND))
    answer = session.ask(ask)
    assert answer.cached == 16
    assert answer.is_like(cold(name, ask))


@every
def test_samples_fork_from_what_was_found(name: str) -> None:
    session = StateSession(warm(name))
    session.ask(Ask(PROMPT))
    for number in range(2):
        session.begin(f"fork {number}", Ask((*PROMPT, *FIRST), SAMPLED, seed=7))
        session.finish()
        assert session.cached[f"fork {number}"] == (36, 44)[number]
        for index in range(2):
            wanted = cold(name, Ask((*PROMPT, *FIRST), {"temperature": 1.0}, seed=7 + index))
            assert session.answer(f"fork {number}", index).is_like(wanted)


@every
def test_preemption_by_lack_of_blocks(name: str) -> None:
    # Each needs 9 blocks.
    asks = {f"r{index}": Ask(tokens_from(10 + index, 30)) for index in range(2)}
    assert_preempted(name, asks, num_blocks=17, budget=64)


@every
def test_preemption_by_client_shares(name: str) -> None:
    asks = {
        f"r{index}": Ask(tokens_from(20 + index, 14), {"max_tokens": 12}, fields={"client": client})
        for index, client in enumerate("aab")
    }
    assert_preempted(name, asks, max_num_seqs=2)


def assert_preempted(name: str, asks: dict[str, Ask], **settings: Any) -> None:
    """Check that preempted requests run fewer tokens again than without snapshots."""
    run = {}
    for caching in (False, True):
        session = StateSession(
            model_of(name, "warm" if caching else "cold", "reference"), caching=caching, **settings
        )
        for number, (request_id, ask) in enumerate(asks.items()):
            session.begin(request_id, ask)
            if number:
                session.step()
        session.finish()
        assert session.scheduler.stats().num_preemptions > 0
        run[caching] = session.num_run
        for request_id, ask in asks.items():
            assert session.answer(request_id).is_like(cold(name, ask))
    assert run[True] < run[False]


@every
def test_proposals_behind_what_was_found(name: str) -> None:
    session = StateSession(model_of(name, "speculating", "reference"), speculative=NGRAM)
    # Answers of two tokens often repeat themselves, and hot ones not always.
    params = {"max_tokens": 24, "temperature": 5.0, "allowed_token_ids": (7, 11)}
    asks = [Ask((*PROMPT, *PROMPT[:9]), params, seed=seed) for seed in range(3)]
    answers = [session.ask(ask) for ask in asks]
    assert [answer.cached for answer in answers] == [0, 44, 44]
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.is_like(cold(name, ask))
    stats = session.scheduler.stats().speculation
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@every
def test_abort_in_mid_prefill(name: str) -> None:
    session = StateSession(warm(name), budget=8, snapshot_tokens=8)
    ask = Ask(tokens_from(30, 60))
    session.begin("aborted", ask)
    for _ in range(4):
        session.step()
    assert session.scheduler.abort("aborted")
    session.scheduler.check_integrity()
    answer = session.ask(ask)
    assert 8 <= answer.cached < 32
    assert answer.is_like(cold(name, ask))


@every
def test_adapters_find_their_own(name: str) -> None:
    model = warm(name)
    model.add_adapter()
    session = StateSession(model)
    plain, adapted = Ask(PROMPT), Ask(PROMPT, adapter=True)
    answers = [session.ask(ask) for ask in (plain, adapted, plain, adapted)]
    assert [answer.cached for answer in answers] == [0, 0, 36, 36]
    assert not answers[0].is_like(answers[1])
    for answer, ask in zip(answers, (plain, adapted, plain, adapted), strict=True):
        assert answer.is_like(cold(name, ask))


@contextmanager
def updated(name: str, session: StateSession, version: int) -> Iterator[None]:
    """Give both models of an architecture other weights in the context."""
    models = (model_of(name, "cold", "reference"), session.model)
    for model in models:
        model.put(version)
    session.scheduler.refresh_weights()
    try:
        yield
    finally:
        for model in models:
            model.put(0)
        session.scheduler.refresh_weights()


@every
def test_update_between_turns(name: str) -> None:
    session = StateSession(warm(name))
    with updated(name, session, 0):
        first = session.ask(Ask(PROMPT))
    second = Ask(next_turn(PROMPT, first, seed=6))
    with updated(name, session, 1):
        answers = [session.ask(second), session.ask(second)]
        assert [answer.cached for answer in answers] == [0, 52]
        assert all(answer.is_like(cold(name, second)) for answer in answers)
    # The first weights find theirs.
    again = session.ask(second)
    assert again.cached == 36
    assert again.is_like(cold(name, second))
    assert not again.is_like(answers[0])


@every
def test_update_within_an_answer(name: str) -> None:
    session = StateSession(warm(name))
    with updated(name, session, 0):
        session.begin("straddles", Ask(PROMPT, {"max_tokens": 30}))
        while len(session.tokens.get(("straddles", 0), ())) < 8:
            session.step()
    with updated(name, session, 1):
        session.finish()
        longer = Ask(next_turn(PROMPT, session.answer("straddles"), seed=8))
        answer = session.ask(longer)
        assert answer.cached == 0
        assert answer.is_like(cold(name, longer))


@every
def test_steps_that_fail(name: str) -> None:
    """Let a step fail before it is computed, so that its slot has no state, and after it is."""
    session = StateSession(warm(name))
    for is_run in (False, True):
        session.begin("fails", Ask(PROMPT))
        batch = session.scheduler.schedule()
        assert batch is not None
        if is_run:
            session.runner.submit(batch).wait()
        (update,) = session.scheduler.fail(batch, "it fails")
        assert update.error == "it fails"
    for cached in (0, 36):
        answer = session.ask(Ask(PROMPT))
        assert answer.cached == cached
        assert answer.is_like(cold(name, Ask(PROMPT)))


def spoil(session: StateSession) -> None:
    """Put a NaN into the state of the only sequence."""
    store: Any = session.runner._path._states
    batch, row = store._rows[0]
    states = [[spoilt(array) for array in entries] for entries in batch.states]
    store._rows[0] = replace(batch, states=states), row


def spoilt(array: mx.array) -> mx.array:
    return array * mx.nan if mx.issubdtype(array.dtype, mx.floating) else array


@every
def test_a_nan_in_a_state(name: str) -> None:
    if name == "longcat_flash_ngram":
        pytest.skip("its state is token ids")
    session = StateSession(warm(name))
    session.begin("spoilt", Ask(PROMPT, {"logprobs": None}))
    session.step()
    spoil(session)
    errors: list[str] = []
    while (batch := session.scheduler.schedule()) is not None:
        updates = session.scheduler.update(batch, session.runner.submit(batch).wait())
        errors += [update.error for update in updates if update.error is not None]
    assert errors == [BAD_STATE]
    assert session.scheduler.stats().snapshots.num_used == 0
    session.scheduler.check_integrity()
    # Stock attention multiplies the values of masked positions by zero, and NaN stays NaN.
    session.runner._path.release_kv()
    session.runner._path.restore_kv()
    for cached in (0, 36):
        answer = session.ask(Ask(PROMPT))
        assert answer.cached == cached
        assert answer.is_like(cold(name, Ask(PROMPT)))
