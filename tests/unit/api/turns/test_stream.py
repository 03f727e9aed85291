"""Events of a turn to its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.turns.stream import SampleState, ToolCall, ToolCallEnd, TurnPart, TurnStream
from mlx_parallm.parsing.families.json_calls import HERMES
from mlx_parallm.parsing.parts import (
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    TurnParser,
)
from mlx_parallm.parsing.turn import THINK, turn_parser
from mlx_parallm.types.events import FinishReason, PromptEvent, TokenEvent

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def parser() -> TurnParser:
    return turn_parser(tool_format=HERMES, reasoning_format=THINK)


def event(text: str, reason: FinishReason | None = None, index: int = 0) -> TokenEvent:
    return TokenEvent(request_id="r", index=index, token_ids=(1,), text=text, finish_reason=reason)


def feed(
    state: SampleState, pieces: Sequence[str], reason: FinishReason = FinishReason.STOP
) -> list[TurnPart]:
    parts = [part for piece in pieces for part in state.add(event(piece))]
    return [*parts, *state.add(event("", reason))]


def test_parts_are_collected_and_calls_end() -> None:
    state = SampleState(parser())
    parts = feed(state, ["<think>hm</think>\n", "Let me see.\n", CALL, "\n", CALL])
    assert (state.reasoning, state.content) == ("hm", "Let me see.")
    assert [(call.name, call.arguments) for call in state.calls] == [("f", '{"a": 1}')] * 2
    assert state.finish_reason == "tool_calls"
    kinds = [type(part) for part in parts]
    assert kinds == [
        ReasoningText, ContentText,
        ToolCallBegin, ToolCallArguments, ToolCallEnd,
        ToolCallBegin, ToolCallArguments, ToolCallEnd,
    ]  # fmt: skip
    begins = [part for part in parts if isinstance(part, ToolCallBegin)]
    assert [part.id for part in begins] == [call.id for call in state.calls]
    assert len({part.id for part in begins}) == 2
    assert all(part.id is not None and part.id.startswith("call_") for part in begins)


@given(st.lists(st.integers(0, 200)))
def test_cuts_change_nothing(cuts: list[int]) -> None:
    text = f"<think>a</think>b {CALL}\n{CALL} c"
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    state = SampleState(parser())
    feed(state, [text[a:b] for a, b in pairwise(places)])
    assert (state.reasoning, state.content, len(state.calls)) == ("a", "bc", 2)
    assert {call.arguments for call in state.calls} == {'{"a": 1}'}


def test_one_call_at_most_leaves_the_others_out() -> None:
    state = SampleState(parser(), max_calls=1)
    parts = feed(state, [CALL, CALL, "and more"])
    assert len(state.calls) == 1
    assert {getattr(part, "index", 0) for part in parts} == {0}
    assert sum(isinstance(part, ToolCallEnd) for part in parts) == 1


def test_a_cut_call_ends_with_the_sample_by_length() -> None:
    state = SampleState(parser())
    parts = feed(state, [CALL[:45]], FinishReason.LENGTH)
    assert state.finish_reason == "length"
    assert parts[-1] == ToolCallEnd(0, is_cut=True)


@pytest.mark.parametrize("reason", FinishReason)
def test_a_call_is_cut_where_its_arguments_are(reason: FinishReason) -> None:
    for end in range(len(CALL) + 1):
        state = SampleState(parser())
        parts = feed(state, [CALL[:end]], reason)
        if not state.calls:
            continue
        is_whole = state.calls[0].arguments == '{"a": 1}'
        assert parts[-1] == ToolCallEnd(0, is_cut=reason != FinishReason.STOP and not is_whole)


def test_without_calls_the_engine_s_reason_stands() -> None:
    for reason in FinishReason:
        state = SampleState(parser())
        feed(state, ["hello"], reason)
        assert state.finish_reason == str(reason)


def test_usage_counts_all_samples() -> None:
    stream = TurnStream([parser(), parser()], 7)
    stream.add(PromptEvent(request_id="r", num_cached_tokens=3))
    for index in (0, 1):
        for piece in ("<think>", "a", "b", "</think>", "c"):
            stream.add(event(piece, index=index))
    usage = stream.usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (7, 3)
    assert (usage.completion_tokens, usage.reasoning_tokens) == (10, 6)


def test_the_text_for_a_custom_tool() -> None:
    assert ToolCall("c", "f", '{"input": "a\\nb"}').custom_input == "a\nb"
    assert ToolCall("c", "f", '{"input": 7}').custom_input == "7"
    for cut in ("{", '{"input"', '{"input": "'):
        assert ToolCall("c", "f", cut).custom_input == ""
    for other in ("", "[1]", "[" * 100_000):
        assert ToolCall("c", "f", other).custom_input == other


def test_the_text_of_a_custom_tool_can_be_sent() -> None:
    call = ToolCall("c", "patch", r'{"input": "a\ud800b"}')
    assert call.custom_input == "a?b"


@given(st.lists(st.integers(0, 120)))
def test_tokens_that_come_together_give_the_same(cuts: list[int]) -> None:
    """Tokens of a single event give one part per kind, and are counted as if they came alone."""
    text = f"<think>hm, so</think>\nLet me see.\n{CALL}"
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    events = [event(text[begin:end]) for begin, end in pairwise(bounds)]
    events.append(event("", FinishReason.STOP))
    one_by_one, together = SampleState(parser()), SampleState(parser())
    for token in events:
        one_by_one.add(token)
    joined = replace(events[-1], text=text, token_ids=(1,) * len(events), pieces=tuple(events))
    parts = together.add(joined)
    assert together.raw.token_ids == one_by_one.raw.token_ids
    assert together.reasoning_tokens == one_by_one.reasoning_tokens
    assert (together.reasoning, together.content) == (one_by_one.reasoning, one_by_one.content)
    assert [call.arguments for call in together.calls] == [
        call.arguments for call in one_by_one.calls
    ]
    kinds = [type(part) for part in parts]
    assert kinds.count(ReasoningText) == 1


@pytest.mark.parametrize(
    ("stop_reason", "is_callers"), [("\n", True), (7, True), (8, False), (None, False)]
)
def test_a_stop_of_the_caller_within_arguments_makes_no_call(
    stop_reason: str | int | None, is_callers: bool
) -> None:
    state = SampleState(parser(), stop_ids=(7,))
    feed_all = [part for piece in CALL[: CALL.index("1")] for part in state.add(event(piece))]
    last = replace(event("", FinishReason.STOP), stop_reason=stop_reason)
    ends = [part for part in (*feed_all, *state.add(last)) if isinstance(part, ToolCallEnd)]
    assert ends == [ToolCallEnd(0, is_cut=is_callers)]
    assert state.finish_reason == ("stop" if is_callers else "tool_calls")
    whole = SampleState(parser(), stop_ids=(7,))
    whole.add(event(CALL))
    whole.add(last)
    assert whole.finish_reason == "tool_calls"
