"""Outputs in vLLM's tests of its reasoning parsers, read by this server's parsers."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.parsing.formats import ReasoningFormat, merge
from mlx_parallm.parsing.parts import (
    ContentText,
    Part,
    ReasoningText,
)
from mlx_parallm.parsing.registry import reasoning_format
from mlx_parallm.parsing.turn import turn_parser
from tests.corpus.fetch import unpacked
from tests.corpus.sources import VLLM
from tests.corpus.vllm_cases import Case, read_cases

pytestmark = pytest.mark.sample

#: The formats of vLLM's test modules.
REASONING = {
    "deepseekr1_reasoning": "deepseek_r1",
    "ernie45_reasoning": "ernie45",
    "gemma4_reasoning": "gemma4",
    "glm4_moe_reasoning": "glm45",
    "granite_reasoning": "granite",
    "granite_thinking_reasoning": "deepseek_r1",
    "hunyuan_reasoning": "hunyuan_a13b",
    "minimax_m2_reasoning": "minimax_m2",
    "nemotron_v3_reasoning": "nemotron_v3",
    "olmo3_reasoning": "deepseek_r1",
    "qwen3_reasoning": "qwen3",
}
#: Outputs that are read otherwise on purpose.
OTHERWISE = {
    "gemma4_reasoning: test_gemma4_reasoning 15": "reasoning comes first, so this is content",
    "qwen3_reasoning: test_reasoning 16": "calls end reasoning only with tools",
    "qwen3_reasoning: test_reasoning 18": "calls end reasoning only with tools",
}


CASES = read_cases(unpacked(VLLM), REASONING)


def opens_reasoning(form: ReasoningFormat, case: Case) -> bool:
    """True if the prompt opened the reasoning of an output."""
    starts = {form.start, form.also_begins or form.start}
    is_closed = form.end in case.text
    return not any(start in case.text for start in starts) and (bool(case.reasoning) or is_closed)


def parts_of(case: Case, size: int) -> list[Part]:
    """Return the parts of a text that comes in pieces of a size."""
    form = reasoning_format(REASONING[case.module])
    parser = turn_parser(
        tool_format=None,
        reasoning_format=form,
        reasoning_is_open=opens_reasoning(form, case),
    )
    pieces = [case.text[at : at + size] for at in range(0, len(case.text), size)]
    parts = [part for piece in pieces for part in parser.add(piece)]
    return merge(parts + parser.flush())


def text_of(parts: list[Part], kind: type[ContentText] | type[ReasoningText]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind)).strip()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_output(case: Case, record_property: Any) -> None:
    record_property("case", case.module)
    whole = parts_of(case, max(1, len(case.text)))
    for size in (1, 3, 8):
        assert parts_of(case, size) == whole
    read = (text_of(whole, ReasoningText), text_of(whole, ContentText))
    is_same = read == (case.reasoning.strip(), case.content.strip())
    assert is_same == (case.id not in OTHERWISE), read
    record_property("outcome", "the same" if is_same else "otherwise, on purpose")
