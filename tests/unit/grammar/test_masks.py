"""Masks against all tokens tried one by one, and what a sample's tokens do to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLExecutor, LLMatcher

from mlx_parallm.grammar import masks as module
from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.masks import ConstrainedRow, GrammarMasks, RowMasks
from mlx_parallm.types.grammar import Grammar
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec
from mlx_parallm.worker.sampling.sampler import apply_token_mask
from tests.small_vocabulary import (
    CALL,
    END,
    NUM_ROWS,
    OTHER_END,
    TEXTS,
    THINK,
    THINK_END,
    TOKENS,
    ids_of,
    small_compiler,
)

COMPILER = small_compiler()
TWO_ENDS = small_compiler(END, OTHER_END)
SPECIAL = {END, OTHER_END, THINK, THINK_END, CALL}
# What begins the text "no".
N = {*ids_of("n"), TOKENS.index("no")}


def grammar(options: Sequence[str], **more: Any) -> Grammar:
    return Grammar(text=COMPILER.compile(specs.choice(options)), **more)


def row(
    output: Sequence[int],
    of: Grammar,
    *,
    banned: Sequence[int] = (),
    pending: bool = False,
    **params: Any,
) -> ConstrainedRow:
    spec = SampleSpec(
        params=SamplingParams(grammar=of, **params),
        seed=0,
        position=5,
        prompt_ids=(1,),
        output_ids=list(output),
        banned_ids=tuple(banned),
        has_pending=pending,
    )
    return ConstrainedRow(0, 7, spec)


def allowed(masks: RowMasks, place: int = 0) -> set[int]:
    bits = np.unpackbits(masks.words[place].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def mask(output: Sequence[int], of: Grammar, **options: Any) -> set[int]:
    return allowed(GrammarMasks(COMPILER).compute([row(output, of, **options)]))


def brute_force(prefix: str, options: Sequence[str], ends: set[int]) -> set[int]:
    """Return every token after which some option can still be completed."""
    ids = {
        token
        for token, text in enumerate(TEXTS)
        if token not in SPECIAL and any(option.startswith(prefix + text) for option in options)
    }
    return ids | (ends if prefix in options else set())


options_of = st.lists(st.text("ab1 <>/", min_size=1, max_size=6), min_size=1, max_size=6)


@settings(max_examples=60)
@given(options_of, st.data())
def test_masks_are_what_trying_every_token_finds(options: list[str], data: st.DataObject) -> None:
    of = grammar(options)
    masks = GrammarMasks(COMPILER)
    output: list[int] = []
    prefix = ""
    for _ in range(8):
        ids = allowed(masks.compute([row(output, of)]))
        assert ids == brute_force(prefix, options, {END})
        token = data.draw(st.sampled_from(sorted(ids)))
        if token == END:
            return
        output.append(token)
        prefix += TEXTS[token]


def test_every_end_is_an_end() -> None:
    of = Grammar(text=TWO_ENDS.compile(specs.choice(["a", "ab"])))
    masks = GrammarMasks(TWO_ENDS)
    masked = masks.compute([row(ids_of("a"), of, stop_token_ids=(CALL,))])
    assert allowed(masked) == {END, OTHER_END, CALL, *ids_of("b")}


def test_what_is_complete_ends_although_ends_are_banned() -> None:
    of = grammar(["a", "ab"])
    assert mask(ids_of("a"), of, banned=[END]) == set(ids_of("b"))
    assert mask(ids_of("ab"), of, banned=[END]) == {END}


def test_a_sample_that_has_ended_has_no_mask() -> None:
    masked = GrammarMasks(COMPILER).compute([row([*ids_of("a"), END], grammar(["a"]))])
    assert masked.rows == []
    assert masked.failed == {}


def test_a_token_outside_the_grammar_fails_its_sample_only() -> None:
    good = ConstrainedRow(1, 8, row(ids_of("a"), grammar(["ab"])).spec)
    masked = GrammarMasks(COMPILER).compute([row(ids_of("x"), grammar(["ab"])), good])
    assert list(masked.failed) == [7]
    assert masked.rows == [1]
    assert allowed(masked) == set(ids_of("b"))


def test_a_text_that_is_no_grammar_fails_its_sample() -> None:
    masked = GrammarMasks(COMPILER).compute([row([], Grammar(text="{}"))])
    assert list(masked.failed) == [7]


def test_pending_tokens_come_last_and_only_once() -> None:
    masks, of = GrammarMasks(COMPILER), grammar(["abc"])
    letters = ids_of("abc")
    masked = masks.compute([row([], of, pending=True)], {7: letters[0]})
    assert letters[1] in allowed(masked)
    # The token is known now.
    assert letters[1] in allowed(masks.compute([row(letters[:1], of)]))
    masked = masks.compute([row(letters[:1], of, pending=True)], {7: letters[1]})
    assert allowed(masked) == {letters[2]}


def test_a_matcher_that_was_dropped_is_made_again() -> None:
    masks, of = GrammarMasks(COMPILER), grammar(["abab", "abba"])
    masks.compute([row(ids_of("a"), of)])
    assert len(masks) == 1
    masks.forget([7])
    assert len(masks) == 0
    assert allowed(masks.compute([row(ids_of("abb"), of)])) == set(ids_of("a"))


@pytest.mark.parametrize(
    "thinking",
    [
        [*ids_of("so "), THINK_END],
        ids_of("a</think>"),
        [TOKENS.index("</th"), TOKENS.index("ink>")],
    ],
)
def test_text_before_the_marker_is_free_but_cannot_end(thinking: list[int]) -> None:
    masks, of = GrammarMasks(COMPILER), grammar(["no"], begins_after="</think>")
    for length in range(len(thinking)):
        ids = allowed(masks.compute([row(thinking[:length], of, stop_token_ids=(CALL,))]))
        assert ids == set(range(len(TOKENS))) - {END, CALL}
    assert allowed(masks.compute([row(thinking, of)])) == N


def test_what_a_token_has_behind_the_marker_belongs_to_the_grammar() -> None:
    of = grammar(["xy"], begins_after="</think>")
    assert mask([*ids_of("</think"), TOKENS.index(">x")], of) == set(ids_of("y"))
    refused = GrammarMasks(COMPILER).compute(
        [row([*ids_of("</think"), TOKENS.index(">x")], grammar(["yy"], begins_after="</think>"))]
    )
    assert list(refused.failed) == [7]


def test_only_a_sample_that_begins_with_the_start_is_free() -> None:
    of = grammar(["no"], begins_after="</think>", free_starts=("<think>",))
    assert mask([], of) == N | {THINK}
    assert mask(ids_of("n"), of) == set(ids_of("o"))
    assert len(mask([THINK], of)) == len(TOKENS) - 1
    assert mask([THINK, *ids_of("hm"), THINK_END], of) == N


def test_only_samples_with_two_matchers_cost_a_row_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mix samples with none, one and two matchers: each has the mask that it has alone."""
    shapes: list[tuple[int, ...]] = []
    fill = module.fill_next_token_bitmask_par

    def note(executor: LLExecutor, jobs: list[tuple[LLMatcher, int]], words: np.ndarray) -> None:
        shapes.append(words.shape)
        fill(executor, jobs, words)

    plain = grammar(["no", "ab"])
    thinking = grammar(["no", "abba"], begins_after="</think>", free_starts=("<think>",))
    mixed = [
        ([], thinking),
        ([], plain),
        ([END], plain),
        ([THINK], thinking),
        ([], thinking),
        (ids_of("a"), plain),
    ]
    alone = [allowed(GrammarMasks(COMPILER).compute([row([], each)])) for each in (thinking, plain)]
    rows = [ConstrainedRow(i, i, row(output, of).spec) for i, (output, of) in enumerate(mixed)]
    monkeypatch.setattr(module, "fill_next_token_bitmask_par", note)
    masked = GrammarMasks(COMPILER).compute(rows)
    assert shapes == [(len(mixed) + 2, COMPILER.vocabulary.num_words)]
    assert masked.rows == [0, 1, 3, 4, 5]
    free = set(range(len(TOKENS))) - {END}
    masks = [allowed(masked, place) for place in range(5)]
    assert masks == [alone[0], alone[1], free, alone[0], set(ids_of("b"))]


STARTS = ("<call>ab", "abc:", "<call>a<think>b", "a<call>")


def tokens_of(text: str) -> list[int]:
    """Return the tokens that a model writes a marker with."""
    parts = re.split(f"({'|'.join(map(re.escape, TEXTS[:5]))})", text)
    return [
        token
        for part in parts
        for token in ([TEXTS.index(part)] if part in TEXTS else ids_of(part))
    ]


@pytest.mark.parametrize("start", STARTS)
def test_a_start_of_several_tokens_frees_a_sample(start: str) -> None:
    of = grammar(["no", "abba"], begins_after="</think>", free_starts=(start,))
    tokens = tokens_of(start)
    for place, token in enumerate(tokens):
        assert token in mask(tokens[:place], of)
    assert len(mask(tokens, of)) == len(TOKENS) - 1
    after = mask([*tokens, *ids_of("hm"), THINK_END], of)
    assert after == N | {*ids_of("a"), TOKENS.index("ab")}
    # What may be the beginning of either may still become either.
    assert mask(ids_of("n"), of) == set(ids_of("o"))
    assert set(ids_of("b")) <= mask(ids_of("a"), of)


def test_the_last_token_of_a_start_may_have_more() -> None:
    of = grammar(["no"], begins_after="x", free_starts=("think>",))
    think, more = TOKENS.index("think"), TOKENS.index(">x")
    assert more in mask([think], of)
    # Its rest has the end of the free text.
    assert mask([think, more], of) == N


def test_neither_a_start_nor_a_text_of_the_grammar_fails() -> None:
    of = grammar(["no"], begins_after="</think>", free_starts=("<call>a",))
    for wrong in ([CALL, *ids_of("n")], ids_of("x"), [*ids_of("n"), CALL]):
        assert list(GrammarMasks(COMPILER).compute([row(wrong, of)]).failed) == [7]


def test_an_end_token_in_a_grammar_ends_it_only_at_its_end() -> None:
    last, inside = (
        Grammar(text=COMPILER.compile(specs.context_free(f'start: a{more}\na: "a" <[{END}]>')))
        for more in ("", ' "b"')
    )
    assert mask(ids_of("a"), last) == {END}
    assert list(GrammarMasks(COMPILER).compute([row(ids_of("a"), inside)]).failed) == [7]


def test_special_tokens_in_a_value_are_text() -> None:
    assert mask([], grammar(["<call>a"])) == set(ids_of("<"))
    schema = COMPILER.compile(specs.json_schema({"type": "string"}))
    ids = mask(ids_of('"'), Grammar(text=schema))
    assert not ids & SPECIAL
    assert not any(token >= len(TOKENS) for token in ids)


@settings(max_examples=40)
@given(
    st.integers(1, 5),
    st.integers(1, 100),
    st.integers(1, 4),
    st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
    st.randoms(use_true_random=False),
)
def test_masked_logits_are_as_bit_by_bit(
    rows: int, vocab: int, num_words: int, dtype: mx.Dtype, draw: Any
) -> None:
    words = np.array(
        [[draw.getrandbits(32) for _ in range(num_words)] for _ in range(rows)], dtype=np.uint32
    )
    logits = mx.array(np.arange(rows * vocab, dtype=np.float32).reshape(rows, vocab)).astype(dtype)
    masked = apply_token_mask(logits, words)
    assert masked.dtype == dtype
    assert masked.shape == (rows, vocab)
    before, after = np.array(logits.astype(mx.float32)), np.array(masked.astype(mx.float32))
    for r in range(rows):
        for token in range(vocab):
            keeps = token // 32 < num_words and int(words[r, token // 32]) >> (token % 32) & 1
            assert after[r, token] == (before[r, token] if keeps else -np.inf)


def test_rows_of_a_model_that_are_no_tokens_are_left_out() -> None:
    assert len(TOKENS) < NUM_ROWS
    of = Grammar(text=COMPILER.compile(specs.regex("(.|\n)*")))
    assert mask([], of) == {END} | (set(range(len(TOKENS))) - SPECIAL)
