"""A renderer of assistant turns with published chat templates, and a check of the parsers.

    python scripts/render_parser_fixtures.py FOLDER [--write]

FOLDER holds the templates, which are no part of this repository; ``parser_templates.py`` names
their sources. A turn is the text that a template adds to a prompt for an assistant's message. Each
turn is parsed and compared with its message, and the detected formats are compared with the
expected ones. With ``--write`` the turns become fixtures of the tests, else they must equal them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from parser_templates import TEMPLATES, Template
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_parallm.parsing.formats import merge
from mlx_parallm.parsing.parts import ContentText, Part, ReasoningText, ToolCallBegin
from mlx_parallm.parsing.registry import (
    detect_reasoning_format,
    detect_tool_format,
    reasoning_format,
    tool_format,
)
from mlx_parallm.parsing.turn import turn_parser

Json = dict[str, Any]

FIXTURES = Path(__file__).parents[1] / "tests" / "unit" / "parsing" / "fixtures" / "rendered"
EOS = "<EOS>"
# _OPENING: text that a prompt may open or leave out, unlike the rendered conversation.
_OPENING = re.compile(
    r"(?:</?[\w:]*think[\w:]*>|<\|(?:START|END)_THINKING\|>|<\|channel>thought\n|<channel\|>|\s)+$"
)


def _tool(name: str, properties: Json) -> Json:
    described = {key: {**value, "description": key} for key, value in properties.items()}
    parameters = {"type": "object", "properties": described, "required": list(properties)[:1]}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Does {name}.", "parameters": parameters},
    }


TOOLS: list[Any] = [
    _tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}),
    _tool(
        "plan",
        {
            "note": {"type": "string"},
            "steps": {"type": "array", "items": {}},
            "where": {"type": "object"},
            "share": {"type": "number"},
            "exact": {"type": "boolean"},
        },
    ),
    _tool("now", {}),
]
_PARIS: Json = {"name": "get_weather", "arguments": {"city": "Paris"}}
_ROMA: Json = {"name": "get_weather", "arguments": {"city": "Roma", "days": 3}}
_NOW: Json = {"name": "now", "arguments": {}}
_LINES = "def f(x):\n    return x < 1 and \"a\\b\" or 'c' # </b> & {y} [z]\n\nf(2)"


def _plan(**arguments: Any) -> Json:
    return {"name": "plan", "arguments": arguments}


# CASES: name of the case, reasoning, content and calls.
CASES: tuple[tuple[str, str, str, list[Json]], ...] = (
    ("one call", "", "", [_PARIS]),
    ("an integer", "", "", [_ROMA]),
    ("no arguments", "", "", [_NOW]),
    ("unicode", "", "", [_plan(note="été 東京 🗼 ñ")]),
    ("lines and quotes", "", "", [_plan(note=_LINES)]),
    (
        "nested arguments",
        "",
        "",
        [
            _plan(
                note="a{b}[c] (d), e=f",
                steps=[{"at": {"x": 1.5, "tags": ["}", "]", "a, b", ""]}}, [], True, -2],
                where={"Rue d'Été": {"n": [1, 2]}},
            )
        ],
    ),
    ("numbers and booleans", "", "", [_plan(note="12", share=0.25, exact=False)]),
    ("several calls", "", "", [_PARIS, _ROMA, _NOW]),
    ("text before a call", "", "Let me look.", [_ROMA]),
    ("text before several calls", "", "Let me look: 1 < 2.", [_NOW, _PARIS]),
    ("reasoning before a call", "Hm, the <b>weather</b>?", "", [_PARIS]),
    ("reasoning and text before a call", "Hm.\n\nLook.", "Let me look.", [_PARIS]),
    ("no call", "", "Paris is a city. <b>Really</b>, 1 < 2 {x} [y].", []),
    ("reasoning before an answer", "Hm, a city.", "Paris is a city.", []),
)


def wanted_cases(template: Template) -> Iterator[tuple[str, str, str, list[Json]]]:
    """Yield the cases that a template can write."""
    for case in CASES:
        name, reasoning, content, calls = case
        needs = {
            "reasoning": bool(reasoning),
            "text": bool(content and calls),
            "several": len(calls) > 1,
            "arguments": name not in ("one call", "no arguments", "no call", "unicode"),
        }
        if name not in template.skips and not any(needs[part] for part in template.leaves_out):
            yield case


def _message(reasoning: str, content: str, calls: list[Json], *, key: str) -> Json:
    message: Json = {"role": "assistant", "content": content}
    if reasoning and key == "blocks":
        thinking = {"type": "thinking", "thinking": reasoning}
        message["content"] = [thinking, {"type": "text", "text": content}]
    elif reasoning:
        message[key] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call{number:05}", "type": "function", "function": call}
            for number, call in enumerate(calls)
        ]
    return message


def render_turn(source: str, template: Template, message: Json) -> tuple[str, bool]:
    """Return the assistant's text, and True if the prompt opened its reasoning."""
    user = {"role": "user", "content": "Hello."}

    def render(messages: list[Json], *, prompt: bool) -> str:
        rendered, _ = render_jinja_template(
            [messages],
            tools=TOOLS,
            chat_template=source,
            add_generation_prompt=prompt,
            bos_token="",
            eos_token=EOS,
            enable_thinking=True,
            thinking=True,
        )
        return rendered[0]

    prompt, whole = render([user], prompt=True), render([user, message], prompt=False)
    if not whole.startswith(prompt):
        prompt = _OPENING.sub("", prompt)
    if not whole.startswith(prompt):
        raise ValueError(f"{template.file} writes another prompt: {prompt[-80:]!r}")
    text = whole[len(prompt) :].rstrip().removesuffix(EOS).rstrip()
    for end in template.ends:
        text = text.removesuffix(end).rstrip()
    form = reasoning_format(template.reasoning) if template.reasoning else None
    is_open = form is not None and (
        form.is_open_after(prompt) or text.lstrip().startswith(form.end)
    )
    return text, is_open


def parse(template: Template, text: str, *, is_open: bool) -> list[Part]:
    """Return the parts that the template's formats make of a turn."""
    parser = turn_parser(
        tool_format=tool_format(template.tools),
        reasoning_format=reasoning_format(template.reasoning) if template.reasoning else None,
        tools=TOOLS,
        reasoning_is_open=is_open,
    )
    return merge(parser.add(text) + parser.flush())


def as_json(parts: list[Part]) -> list[Json]:
    """Parts as fixtures write them."""
    written: list[Json] = []
    for part in parts:
        if isinstance(part, ToolCallBegin):
            identity = {"id": part.id} if part.id else {}
            written.append({"call": part.name, **identity, "arguments": ""})
        elif isinstance(part, ContentText):
            written.append({"content": part.text})
        elif isinstance(part, ReasoningText):
            written.append({"reasoning": part.text})
        else:
            written[-1]["arguments"] += part.text
    return written


def differences(parts: list[Json], reasoning: str, content: str, calls: list[Json]) -> list[str]:
    """Return how the parts differ from the message that was rendered."""
    fixtures = [
        f"{kind} {text!r}, not {wanted!r}"
        for kind, wanted in (("reasoning", reasoning), ("content", content))
        if (text := "".join(part.get(kind, "") for part in parts).strip()) != wanted
    ]
    read = [(part["call"], part["arguments"]) for part in parts if "call" in part]
    try:
        same = [(name, json.loads(arguments)) for name, arguments in read] == [
            (call["name"], call["arguments"]) for call in calls
        ]
    except ValueError:
        same = False
    return fixtures if same else [*fixtures, f"calls {read}"]


def render_cases(source: str, template: Template) -> tuple[list[Json], list[str]]:
    """Return the fixtures' cases of a template, and what the parsers made wrong of them."""
    cases: list[Json] = []
    failures: list[str] = []
    for name, reasoning, content, calls in wanted_cases(template):
        message = _message(reasoning, content, calls, key=template.reasoning_key)
        try:
            text, is_open = render_turn(source, template, message)
        except (TemplateError, ValueError) as error:
            failures.append(f"{template.file}, {name}: {error}")
            continue
        parts = as_json(parse(template, text, is_open=is_open))
        wrong = differences(parts, reasoning, content, calls)
        failures += [f"{template.file}, {name}: {line}\n    {text!r}" for line in wrong]
        opened = {"reasoning_is_open": True} if is_open else {}
        cases.append({"name": name, **opened, "text": text, "parts": parts})
    return cases, failures


def detected(source: str, template: Template) -> list[str]:
    """Return the faults of the parsers detected for a template."""
    tools = detect_tool_format(source, template.vocabulary)
    reasoning = detect_reasoning_format(source, template.vocabulary)
    detected = (tools.name if tools else None, reasoning.name if reasoning else None)
    wanted = (template.tools, template.reasoning)
    return [] if detected == wanted else [f"{template.file}: detected {detected}, not {wanted}"]


def fixture_text(template: Template, cases: list[Json]) -> str:
    """Return the text of a template's fixture file."""
    fixture = {
        "format": template.tools,
        **({"reasoning": template.reasoning} if template.reasoning else {}),
        "source": f"{template.model}: {template.file} of {template.package}",
        "rendered": True,
        "tools": TOOLS,
        "cases": cases,
    }
    return json.dumps(fixture, ensure_ascii=False, indent=1) + "\n"


def main() -> int:
    """Render, compare and report; return 1 if anything differs, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the templates are")
    parser.add_argument("--write", action="store_true", help="write the fixtures")
    arguments = parser.parse_args()
    failures: list[str] = []
    for template in TEMPLATES:
        path = arguments.folder / template.file
        if not path.exists():
            print(f"{template.file} is missing")
            continue
        source = path.read_text()
        cases, wrong = render_cases(source, template)
        failures += [*detected(source, template), *wrong]
        fixture = FIXTURES / f"{path.stem}.json"
        if not template.has_fixtures:
            continue
        text = fixture_text(template, cases)
        if arguments.write:
            fixture.write_text(text)
        elif not fixture.exists() or fixture.read_text() != text:
            failures.append(f"{fixture.name} is not what is rendered")
    print("\n".join(failures) or "All turns are parsed as they were meant.")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
