"""Tool calls as a model writes them, for chat templates that leave them out of a history."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mlx_parallm.parsing.families.json_array import JSON_ARRAY
from mlx_parallm.parsing.families.pythonic import LFM2, LLAMA4_PYTHONIC, OLMO3, PYTHONIC
from mlx_parallm.parsing.formats import CallText, ToolFormat

#: ``WriteCalls``: returns calls, each a name and its arguments, as text. It can be pickled.
WriteCalls = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]

# _PYTHONIC: what is before and after calls in the formats of Python's notation.
_PYTHONIC = {
    PYTHONIC.name: ("[", "]"),
    LLAMA4_PYTHONIC.name: ("<|python_start|>[", "]<|python_end|>"),
    LFM2.name: ("<|tool_call_start|>[", "]<|tool_call_end|>"),
    OLMO3.name: ("<function_calls>", "</function_calls>"),
}


def call_writer(form: ToolFormat | None) -> WriteCalls:
    """Return what writes calls in a format, or as a plain JSON array if that has no text form."""
    if form is not None and form.name in _PYTHONIC:
        return partial(_in_python, *_PYTHONIC[form.name])
    own = form.forced if form is not None else None
    text = own or JSON_ARRAY.forced
    assert text is not None, "the plain array can be forced"
    return partial(_in_json, text)


def _in_json(text: CallText, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    written: list[str] = []
    for name, arguments in calls:
        before, _, after = text.call.partition("$arguments")
        value = json.dumps(arguments, ensure_ascii=False)
        written.append(before.replace("$name", name) + value + after.replace("$name", name))
    return text.begin + (text.separator or "\n").join(written) + text.end


def _in_python(begin: str, end: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return begin + ", ".join(written) + end
