"""The chats of ``benchmarks.hybrid``, what a cache of them computes, and its models."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.hybrid.chat import ANSWER_TOKENS, Chats
from benchmarks.hybrid.load import (
    NUM_CHATS,
    NUM_TURNS,
    CopyingTexts,
    decode_rate,
    kept_by_age,
    kept_by_optimum,
    sessions,
    tokens_computed,
)
from benchmarks.make_hybrid import make_hybrid, state_bytes, successors
from benchmarks.measure import load_tokenizer
from mlx_parallm.bench.record import RequestRecord
from mlx_parallm.config import ModelConfig
from mlx_parallm.tokenizer.loading import load_tokenizer as load_served
from mlx_parallm.worker.weights.loader import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid(tmp_path_factory.mktemp("hybrid"))


def test_a_turn_adds_its_tokens_to_the_prompt_and_other_chats_share_no_text(folder: Path) -> None:
    tokenizer, chats = load_served(folder), Chats(folder)
    answer = " ".join(["word"] * 5)
    answer_tokens = len(tokenizer.encode(answer))
    sizes: list[int] = []
    chat = chats.chat("one", system_tokens=200, turn_tokens=100)
    for _ in range(3):
        chat.begin_turn()
        sizes.append(len(tokenizer.encode_chat(chat.messages)))
        chat.end_turn(answer)
    other = chats.chat("two", system_tokens=200, turn_tokens=100)
    steps = {after - before for before, after in pairwise(sizes)}

    assert steps == {100 - ANSWER_TOKENS + answer_tokens}
    assert chat.messages[0]["content"][:40] != other.messages[0]["content"][:40]


def test_the_model_keeps_the_state_that_it_is_said_to(folder: Path) -> None:
    model = load_model(ModelConfig(), folder).model
    cache = model.make_cache()
    mx.eval(model(mx.array([[1, 2, 3, 4, 5]]), cache=cache))

    nets = [each for layer, each in zip(model.layers, cache, strict=True) if layer.is_linear]
    assert sum(net.nbytes for net in nets) == state_bytes()


def test_the_copying_model_goes_on_in_its_order(tmp_path: Path) -> None:
    folder = make_hybrid(tmp_path, copies=True)
    successor = successors(load_tokenizer(folder))
    model = load_model(ModelConfig(), folder).model
    texts = CopyingTexts(successor)
    prompt = texts.prompt(copies=True)
    following = mx.argmax(model(mx.array([prompt]))[0], axis=-1).tolist()

    assert following == [successor[token] for token in prompt]
    assert sum(successor[a] == b for a, b in pairwise(prompt)) > 100
    shuffled = texts.prompt(copies=False)
    assert sum(successor[a] == b for a, b in pairwise(shuffled)) < 10


def test_no_chat_has_more_turns_than_it_may() -> None:
    order = sessions(NUM_CHATS * NUM_TURNS)

    assert sorted(set(order)) == list(range(NUM_CHATS))
    assert all(order.count(chat) == NUM_TURNS for chat in range(NUM_CHATS))


def test_tokens_are_computed_once_where_all_is_kept() -> None:
    order, sizes = [0, 1, 0, 0], [10, 7, 15, 18]

    assert tokens_computed(order, sizes, [True] * 4) == 18 + 7
    assert tokens_computed(order, sizes, [False] * 4) == sum(sizes)


@given(st.lists(st.integers(0, 4), max_size=9), st.integers(1, 3))
def test_no_cache_of_chats_keeps_more_than_the_optimum(order: list[int], room: int) -> None:
    best = sum(kept_by_optimum(order, room))

    assert sum(kept_by_age(order, room)) <= best
    assert best == _most_kept(order, room)


def _most_kept(order: list[int], room: int) -> int:
    """Return the most hits of any choice of what is kept after each request."""
    most: dict[frozenset[int], int] = {frozenset(): 0}
    for chat in order:
        after: dict[frozenset[int], int] = {}
        for cached, hits in most.items():
            known = cached | {chat}
            for kept in map(frozenset, combinations(sorted(known), min(len(known), room))):
                after[kept] = max(after.get(kept, 0), hits + (chat in cached))
        most = after
    return max(most.values())


def test_a_rate_counts_tokens_from_when_all_requests_have_one() -> None:
    records = [
        RequestRecord(
            index=0, start_s=0, end_s=5, chunk_times_s=[1.0, 3.0, 5.0], chunk_tokens=[1, 2, 3]
        ),
        RequestRecord(index=1, start_s=0, end_s=4, chunk_times_s=[2.0, 4.0], chunk_tokens=[1, 1]),
    ]

    assert decode_rate(records) == (2 + 3 + 1) / 3
