"""Outputs of models in vLLM's tests of its parsers, read by this server's parsers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_parallm.parsing.formats import ReasoningFormat
from mlx_parallm.parsing.parts import (
    ContentText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
)
from mlx_parallm.parsing.registry import reasoning_format, tool_format
from mlx_parallm.parsing.turn import turn_parser
from mlx_parallm.parsing.writer import merge
from tests.corpus.fetch import unpacked
from tests.corpus.sources import VLLM
from tests.corpus.vllm_cases import Case, read_cases

pytestmark = pytest.mark.sample

#: The formats of vLLM's test modules: of tool calls, and of reasoning.
TOOLS = {
    "deepseekv3_tool": "deepseek_v3",
    "ernie45_moe_tool": "ernie45",
    "granite_tool": "granite",
    "hunyuan_a13b_tool": "hunyuan_a13b",
    "jamba_tool": "jamba",
    "kimi_k2_tool": "kimi_k2",
    "llama3_json_tool": "llama3_json",
    "llama4_pythonic_tool": "llama4_pythonic",
    "longcat_tool": "longcat",
    "olmo3_tool": "olmo3",
    "phi4mini_tool": "phi4_mini_json",
    "pythonic_tool": "pythonic",
    "qwen3coder_tool": "qwen3_coder",
    "step3p5_tool": "step3p5",
}
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
    "hunyuan_a13b_tool: test_hunyuan_a13b_tool_parser_extract 4": "text behind calls stays",
    "qwen3_reasoning: test_reasoning 16": "calls end reasoning only with tools",
    "qwen3_reasoning: test_reasoning 18": "calls end reasoning only with tools",
}


CASES = read_cases(unpacked(VLLM), {*TOOLS, *REASONING})


def opens_reasoning(form: ReasoningFormat, case: Case) -> bool:
    """True if the prompt opened the reasoning of an output."""
    starts = {form.start, form.also_begins or form.start}
    is_closed = form.end in case.text
    return not any(start in case.text for start in starts) and (bool(case.reasoning) or is_closed)


def parts_of(case: Case, size: int) -> list[Part]:
    """Return the parts of a text that comes in pieces of a size."""
    calls, thoughts = TOOLS.get(case.module), REASONING.get(case.module)
    form = reasoning_format(thoughts) if thoughts else None
    parser = turn_parser(
        tool_format=tool_format(calls) if calls else None,
        reasoning_format=form,
        tools=case.tools,
        reasoning_is_open=form is not None and opens_reasoning(form, case),
    )
    pieces = [case.text[at : at + size] for at in range(0, len(case.text), size)]
    parts = [part for piece in pieces for part in parser.add(piece)]
    return merge(parts + parser.flush())


def differences(case: Case, parts: list[Part]) -> list[str]:
    """Return what is read otherwise than vLLM reads it."""
    content = "".join(part.text for part in parts if isinstance(part, ContentText))
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    names = tuple(part.name for part in parts if isinstance(part, ToolCallBegin))
    texts = [part.text for part in parts if isinstance(part, ToolCallArguments)]
    calls = [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]
    is_same = {
        "calls": case.calls is None or calls == [(n, json.loads(text)) for n, text in case.calls],
        "names": case.names in (None, names),
        "objects": not case.are_whole or all(isinstance(value, dict) for _, value in calls),
        "a call": not case.are_whole or bool(calls),
        "content": case.content is None or content.strip() == case.content.strip(),
        "reasoning": case.reasoning is None or reasoning.strip() == case.reasoning.strip(),
    }
    return [name for name, same in is_same.items() if not same]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_output(case: Case, record_property: Any) -> None:
    record_property("case", case.module)
    whole = parts_of(case, max(1, len(case.text)))
    for size in (1, 3, 8):
        assert parts_of(case, size) == whole
    found = differences(case, whole)
    assert bool(found) == (case.id in OTHERWISE), found
    record_property("outcome", "otherwise, on purpose" if found else "the same")
