"""Turns as models of each format write them: reasoning, content and calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]
Call = tuple[str, Arguments]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Texts of a format's turns.

    Attributes:
        tool: the name of the tool-call format.
        reasoning: that of a reasoning format which models of this format have.
        call: writes one call.
        begin: text before all calls.
        end: text after all calls.
        separator: text between calls.
        parameter: writes a parameter whose value is plain text; None: values are quoted.
        parameter_end: the tag that ends it; ``$`` stands for its name.
        without_arguments: calls of ``now`` that lack their arguments, with their section.
        bare: True if calls have no marker.
    """

    tool: str
    reasoning: str
    call: Callable[[str, Arguments], str]
    begin: str = ""
    end: str = ""
    separator: str = ""
    parameter: Callable[[str, str], str] | None = None
    parameter_end: str = ""
    without_arguments: tuple[str, ...] = ()
    bare: bool = False

    def calls(self, *calls: Call) -> str:
        """Return the text of calls."""
        written = self.separator.join(self.call(name, arguments) for name, arguments in calls)
        return f"{self.begin}{written}{self.end}"

    def end_of(self, key: str) -> str:
        """Return the tag that ends a parameter."""
        return self.parameter_end.replace("$", key)

    def without_end(self, text: str, key: str, number: int) -> str:
        """Return a call's text without the end tag of a parameter, which is that of a number."""
        end = self.end_of(key)
        pieces = text.split(end)
        number = 0 if "$" in self.parameter_end else number
        line = "\n" if end.endswith("\n") else ""
        return end.join(pieces[: number + 1]) + line + end.join(pieces[number + 1 :])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _objects(
    tool: str,
    reasoning: str,
    *,
    begin: str = "",
    end: str = "",
    keys: tuple[str, str] = ("name", "arguments"),
    separator: str = ", ",
    bare: bool = False,
) -> Written:
    def call(name: str, arguments: Arguments) -> str:
        return f'{{"{keys[0]}": "{name}", "{keys[1]}": {_json(arguments)}}}'

    without = [f'{{"{keys[0]}": "now"}}']
    without += [f'{{"{keys[0]}": "now", "{keys[1]}": {value}}}' for value in ("null", '""', "[]")]
    return Written(
        tool=tool,
        reasoning=reasoning,
        call=call,
        begin=begin,
        end=end,
        separator=separator,
        without_arguments=tuple(f"{begin}{text}{end}" for text in without),
        bare=bare,
    )


def _tagged(tool: str, reasoning: str, start: str, end: str) -> Written:
    def call(name: str, arguments: Arguments) -> str:
        return f'{start}\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n{end}'

    without = (f'{start}{{"name": "now"}}{end}', f'{start}{{"name": "now", "arguments": ""}}{end}')
    return Written(
        tool=tool, reasoning=reasoning, call=call, separator="\n", without_arguments=without
    )


def _tags(
    tool: str,
    reasoning: str,
    head: str,
    end: str,
    parameter: tuple[str, str],
    *,
    section: tuple[str, str] = ("", ""),
    line: str = "\n",
    inner: str = "",
) -> Written:
    """Return a format of tags; ``$`` stands for a name, ``inner`` is around values."""
    begin, parameter_end = parameter

    def write(key: str, value: str) -> str:
        return f"{begin.replace('$', key)}{inner}{value}{inner}{parameter_end}{line}"

    def call(name: str, arguments: Arguments) -> str:
        values = "".join(write(key, _plain(value)) for key, value in arguments.items())
        return f"{head.replace('$', name)}{line}{values}{end}{line}"

    now = head.replace("$", "now")
    closed = now.removesuffix(">") + "/>"
    return Written(
        tool=tool,
        reasoning=reasoning,
        call=call,
        begin=section[0] + (line if section[0] else ""),
        end=section[1],
        parameter=write,
        parameter_end=f"{inner}{parameter_end}{line}",
        without_arguments=tuple(
            f"{section[0]}{text}{section[1]}" for text in (f"{now}{end}", closed)
        ),
    )


def _glm(name: str, arguments: Arguments) -> str:
    pairs = (_glm_parameter(key, _plain(value)) for key, value in arguments.items())
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


def _glm_parameter(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"


def _kimi_k3(name: str, arguments: Arguments) -> str:
    pairs = "".join(_kimi_k3_parameter(key, _plain(value)) for key, value in arguments.items())
    return f'<|open|>call tool="{name}" index="1"<|sep|>{pairs}<|close|>call<|sep|>'


def _kimi_k3_parameter(key: str, value: str) -> str:
    kind = "number" if key == "b" else "string"
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def _minimax_m3(name: str, arguments: Arguments) -> str:
    pairs = "".join(_minimax_m3_parameter(key, _plain(value)) for key, value in arguments.items())
    return f'{_M3}<invoke name="{name}">{pairs}{_M3}</invoke>\n'


def _minimax_m3_parameter(key: str, value: str) -> str:
    return f"{_M3}<{key}>{value}{_M3}</{key}>"


def _python(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _pythonic(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"


def _gemma(start: str, end: str, quote: str) -> Callable[[str, Arguments], str]:
    def call(name: str, arguments: Arguments) -> str:
        pairs = (
            f"{key}:{quote}{value}{quote}" if isinstance(value, str) else f"{key}:{_json(value)}"
            for key, value in arguments.items()
        )
        return f"{start}call:{name}{{{','.join(pairs)}}}{end}"

    return call


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_K3_TOOLS = ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")
_M3 = "]<]minimax[>["
_M3_TOOLS = (f"{_M3}<tool_call>\n", f"{_M3}</tool_call>")
_HARMONY = "<|channel|>commentary to=functions."

WRITTEN = (
    _tagged("hermes", "deepseek_r1", "<tool_call>", "</tool_call>"),
    _tagged("longcat", "longcat", "<longcat_tool_call>", "</longcat_tool_call>"),
    _tags(
        "qwen3_coder",
        "deepseek_r1",
        "<function=$>",
        "</function>",
        ("<parameter=$>", "</parameter>"),
        section=("<tool_call>", "</tool_call>"),
        inner="\n",
    ),
    _tags(
        "seed_oss",
        "seed_oss",
        "<function=$>",
        "</function>",
        ("<parameter=$>", "</parameter>"),
        section=("<seed:tool_call>", "</seed:tool_call>"),
        inner="\n",
    ),
    _tags(
        "minimax_m2",
        "deepseek_r1",
        '<invoke name="$">',
        "</invoke>",
        ('<parameter name="$">', "</parameter>"),
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    _tags(
        "deepseek_v32",
        "deepseek_r1",
        '<｜DSML｜invoke name="$">',
        "</｜DSML｜invoke>",
        ('<｜DSML｜parameter name="$">', "</｜DSML｜parameter>"),
        section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ),
    _tags(
        "muse_spark",
        "muse_spark",
        '<atem:invoke name="$">',
        "</atem:invoke>",
        ('<atem:parameter name="$">', "</atem:parameter>"),
        section=("<atem:function_calls>", "</atem:function_calls>"),
    ),
    _tags(
        "minicpm5",
        "deepseek_r1",
        '<function name="$">',
        "</function>",
        ('<param name="$">', "</param>"),
        line="",
    ),
    Written(
        tool="glm45",
        reasoning="deepseek_r1",
        call=_glm,
        parameter=_glm_parameter,
        parameter_end="</arg_value>",
        without_arguments=("<tool_call>now</tool_call>", "<tool_call>now\n</tool_call>"),
    ),
    Written(
        tool="kimi_k3",
        reasoning="kimi_k3",
        call=_kimi_k3,
        begin=_K3_TOOLS[0],
        end=_K3_TOOLS[1],
        parameter=_kimi_k3_parameter,
        parameter_end="<|close|>argument<|sep|>",
        without_arguments=(
            _kimi_k3("now", {}).join(_K3_TOOLS),
            '<|open|>call tool="now" index="1"<|sep|><|open|>json<|sep|><|close|>json<|sep|>'
            "<|close|>call<|sep|>".join(_K3_TOOLS),
        ),
    ),
    Written(
        tool="minimax_m3",
        reasoning="minimax_m3",
        call=_minimax_m3,
        begin=_M3_TOOLS[0],
        end=_M3_TOOLS[1],
        parameter=_minimax_m3_parameter,
        parameter_end=f"{_M3}</$>",
        without_arguments=(
            _minimax_m3("now", {}).join(_M3_TOOLS),
            ']<]minimax[>[<invoke name="now"/>'.join(_M3_TOOLS),
        ),
    ),
    Written(
        tool="kimi_k2",
        reasoning="kimi_k2",
        call=lambda name, arguments: (
            f"{_KIMI_CALL}functions.{name}:0{_KIMI_ARGUMENTS}{_json(arguments)}{_KIMI_END}"
        ),
        begin=_KIMI[0],
        end=_KIMI[1],
        without_arguments=tuple(
            f"{_KIMI_CALL}functions.now:0{text}".join(_KIMI)
            for text in (f"{_KIMI_ARGUMENTS}{_KIMI_END}", _KIMI_END)
        ),
    ),
    Written(
        tool="deepseek_v3",
        reasoning="deepseek_r1",
        call=lambda name, arguments: (
            f"{_DEEPSEEK_CALL}function{_SEP}{name}\n```json\n{_json(arguments)}\n```{_DEEPSEEK_END}"
        ),
        begin=_DEEPSEEK[0],
        end=_DEEPSEEK[1],
        separator="\n",
        without_arguments=tuple(
            f"{_DEEPSEEK_CALL}function{_SEP}now{text}{_DEEPSEEK_END}".join(_DEEPSEEK)
            for text in ("", "\n```json\n```")
        ),
    ),
    Written(
        tool="deepseek_v31",
        reasoning="deepseek_r1",
        call=lambda name, arguments: (
            f"{_DEEPSEEK_CALL}{name}{_SEP}{_json(arguments)}{_DEEPSEEK_END}"
        ),
        begin=_DEEPSEEK[0],
        end=_DEEPSEEK[1],
        without_arguments=tuple(
            f"{_DEEPSEEK_CALL}now{text}{_DEEPSEEK_END}".join(_DEEPSEEK) for text in ("", _SEP)
        ),
    ),
    Written(
        tool="mistral",
        reasoning="mistral",
        call=lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}",
        without_arguments=("[TOOL_CALLS]now[ARGS]", "[TOOL_CALLS]now"),
    ),
    _objects("mistral_json", "mistral", begin="[TOOL_CALLS][", end="]"),
    _objects("llama3_json", "deepseek_r1", keys=("name", "parameters"), separator="; ", bare=True),
    Written(
        tool="pythonic",
        reasoning="deepseek_r1",
        call=_pythonic,
        begin="[",
        end="]",
        separator=", ",
        without_arguments=("[now()]",),
        bare=True,
    ),
    Written(
        tool="llama4_pythonic",
        reasoning="deepseek_r1",
        call=_pythonic,
        begin="<|python_start|>[",
        end="]<|python_end|>",
        separator=", ",
        without_arguments=("<|python_start|>[now]<|python_end|>",),
    ),
    Written(
        tool="lfm2",
        reasoning="deepseek_r1",
        call=_pythonic,
        begin="<|tool_call_start|>[",
        end="]<|tool_call_end|>",
        separator=", ",
        without_arguments=("<|tool_call_start|>[now]<|tool_call_end|>",),
    ),
    Written(
        tool="olmo3",
        reasoning="deepseek_r1",
        call=_pythonic,
        begin="<function_calls>",
        end="</function_calls>",
        separator="\n",
        without_arguments=("<function_calls>now</function_calls>",),
    ),
    _objects("granite", "granite", begin="<|tool_call|>[", end="]"),
    _objects("phi4_mini_json", "deepseek_r1", begin="functools[", end="]"),
    _objects("jamba", "hunyuan_a13b", begin="<tool_calls>[", end="]</tool_calls>"),
    _objects("nemotron_json", "deepseek_r1", begin="<TOOLCALL>[", end="]</TOOLCALL>"),
    _objects(
        "cohere_command3",
        "cohere_command3",
        begin="<|START_ACTION|>[",
        end="]<|END_ACTION|>",
        keys=("tool_name", "parameters"),
    ),
    Written(
        tool="functiongemma",
        reasoning="gemma4",
        call=_gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        without_arguments=("<start_function_call>call:now<end_function_call>",),
    ),
    Written(
        tool="gemma4",
        reasoning="gemma4",
        call=_gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        without_arguments=("<|tool_call>call:now<tool_call|>",),
    ),
    Written(
        tool="openai",
        reasoning="openai_gptoss",
        call=lambda name, arguments: (
            f"{_HARMONY}{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        ),
        without_arguments=(
            f"{_HARMONY}now<|message|><|call|>",
            f"{_HARMONY}now<|call|>",
            f"{_HARMONY}now<|end|>",
            f"{_HARMONY}now",
            f"{_HARMONY}now<|message|>",
        ),
    ),
    _objects(
        "json_array", "deepseek_r1", begin="[", end="]", keys=("name", "parameters"), bare=True
    ),
)
BY_TOOL = {written.tool: written for written in WRITTEN}
