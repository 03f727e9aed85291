"""Names of formats, and which one a chat template or a vocabulary implies."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.chat_format import template_text
from mlx_parallm.parsing.registry import (
    detect_reasoning_format,
    detect_tool_format,
    reasoning_format,
    reasoning_format_names,
    tool_format,
    tool_format_names,
)
from mlx_parallm.types.errors import ConfigError

# Each row has pieces of a family's template that no other family has, and its tokens.
TOOL_SIGNS = [
    ("hermes", '<tool_call>\\n{"name": "\' + tool_call.name', ()),
    ("longcat", "<longcat_tool_call>", ()),
    ("qwen3_coder", "'\\n<tool_call>\\n<function=' + tool_call.name", ()),
    ("seed_oss", "<seed:tool_call>\\n<function=", ()),
    ("minimax_m2", "<minimax:tool_call><invoke name=", ()),
    ("deepseek_v32", "{%- set dsml_token = '｜DSML｜' -%}", ()),
    ("muse_spark", "<atem:function_calls>", ()),
    ("minicpm5", '<function name="{{ n }}"><param name="', ()),
    ("glm45", "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", ()),
    ("kimi_k2", "<|tool_calls_section_begin|>", ()),
    ("kimi_k2", "", ("<|tool_calls_section_begin|>",)),
    ("kimi_k3", "'<|open|>' + tag", ()),
    ("deepseek_v3", "<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>...```json", ()),
    ("deepseek_v31", "<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>", ()),
    ("mistral", "[TOOL_CALLS]", ("[ARGS]",)),
    ("mistral", "[TOOL_CALLS]' + name + '[ARGS]", ()),
    ("mistral_json", "[TOOL_CALLS] [", ()),
    ("llama3_json", '{"name": \'"parameters": \' ipython', ()),
    ("pythonic", "Use exact format: [func_name1(param1=value1)]", ()),
    ("llama4_pythonic", "Use exact format: [func_name1(param1=value1)]", ("<|eot|>",)),
    ("llama4_pythonic", "<|python_start|>", ()),
    ("lfm2", "<|tool_call_start|>[", ()),
    ("lfm2", "", ("<|tool_call_start|>",)),
    ("olmo3", "<function_calls>", ()),
    ("granite", "<|tool_call|>", ()),
    ("phi4_mini_json", "<|tool_call|> ... <|/tool_call|>", ()),
    ("phi4_mini_json", "functools[{", ()),
    ("jamba", "<tool_calls>[", ()),
    ("nemotron_json", "<TOOLCALL>[", ()),
    ("cohere_command3", "<|START_ACTION|>", ()),
    ("functiongemma", "<start_function_call>call:", ()),
    ("gemma4", "<|tool_call>call: ... <tool_call|>", ()),
    ("openai", "<|start|>assistant<|channel|>final<|message|>", ()),
]
REASONING_SIGNS = [
    ("deepseek_r1", "{{ '<think>' }} ... '</think>'", ()),
    ("deepseek_r1", "", ("<think>", "</think>")),
    ("gemma4", "<|channel>thought\\n<channel|>", ()),
    ("kimi_k2", "</think> <|tool_calls_section_begin|>", ()),
    ("mistral", "[THINK] [/THINK]", ()),
    ("seed_oss", "<seed:think> </seed:think>", ()),
    ("longcat", "<longcat_think> </longcat_think>", ()),
    ("cohere_command3", "<|START_THINKING|><|END_THINKING|>", ()),
    ("granite", 'Write "Here is my response:" after it.', ()),
    ("hunyuan_a13b", "<think> </think> <answer>", ()),
    ("hunyuan_a13b", "<think> </think> <|extra_0|>", ()),
    ("kimi_k3", "'<|open|>' + tag", ()),
    ("kimi_k3", "", ("<|open|>", "<|close|>")),
    ("muse_spark", "<atem:function_calls>", ()),
    ("openai_gptoss", "<|channel|>analysis<|message|>", ()),
]


@pytest.mark.parametrize(("name", "template", "tokens"), TOOL_SIGNS)
def test_tool_format_of_a_model(name: str, template: str, tokens: tuple[str, ...]) -> None:
    detected = detect_tool_format(f"{{% if tools %}}{template}{{% endif %}}", tokens)
    assert detected is not None
    assert detected.name == name


@pytest.mark.parametrize(("name", "template", "tokens"), REASONING_SIGNS)
def test_reasoning_format_of_a_model(name: str, template: str, tokens: tuple[str, ...]) -> None:
    detected = detect_reasoning_format(template, tokens)
    assert detected is not None
    assert detected.name == name


def test_the_embedded_model() -> None:
    tools, reasoning = (
        detect_tool_format(template_text(), ()),
        detect_reasoning_format(template_text(), ()),
    )
    assert tools is tool_format("hermes")
    assert reasoning is reasoning_format("qwen3")


@pytest.mark.parametrize("template", [None, "", "{{ messages[0].content }}"])
def test_no_format(template: str | None) -> None:
    assert detect_tool_format(template, ()) is None
    assert detect_reasoning_format(template, ()) is None


def test_names() -> None:
    assert all(tool_format(name) for name in tool_format_names())
    assert all(reasoning_format(name) for name in reasoning_format_names())
    assert {"hermes", "qwen3_xml", "glm47", "openai", "llama4_json"} <= set(tool_format_names())
    with pytest.raises(ConfigError, match="hermes"):
        tool_format("other")
    with pytest.raises(ConfigError, match="qwen3"):
        reasoning_format("other")


def test_reasoning_that_the_prompt_opens() -> None:
    form = reasoning_format("qwen3")
    assert form.is_open_after("<|im_start|>assistant\n<think>\n")
    assert not form.is_open_after("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_documentation_lists_every_name() -> None:
    text = (Path(__file__).parents[3] / "docs" / "tool-calling.md").read_text()
    names = (*tool_format_names(), *reasoning_format_names())
    assert [name for name in names if f"`{name}`" not in text] == []
