"""Turns in which the model decides whether it calls tools, and every call is valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.parsing.families import harmony
from mlx_parallm.parsing.forced import arguments_schema
from mlx_parallm.parsing.formats import CallText, Tool, ToolFormat, tools_of


def strict_calls(
    form: ToolFormat, tools: Sequence[Mapping[str, Any]], *, parallel: bool, prompt: str
) -> dict[str, Any] | None:
    """Return the format of a structural tag: free text and valid calls.

    Args:
        form: the model's own format.
        tools: the request's tools, as for ``forced_calls``.
        parallel: allow several calls.
        prompt: the rendered prompt.

    Returns:
        None if the format cannot be enforced: its calls cannot be written by a grammar, or begin
        with no marker, or the prompt ends within one of Harmony's messages.
    """
    text = form.forced
    if text is None:
        return None
    tags = [_tag(text, tool) for tool in tools_of(tools)]
    if form.is_harmony:
        return _harmony(tags) if prompt.endswith(harmony.ASSISTANT) else None
    trigger = _trigger(form, text)
    if trigger is None:
        return None
    if text.begin:
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": text.separator or "",
            "at_least_one": True,
            "stop_after_first": not parallel or text.separator is None,
        }
        tags = [{"begin": text.begin, "content": calls, "end": text.end}]
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": tags,
        "stop_after_first": not parallel,
    }


def _trigger(form: ToolFormat, text: CallText) -> str | None:
    """Return the text after which a call must follow."""
    start = text.begin or text.call
    marker = next((marker for marker in form.markers if start.startswith(marker)), None)
    # A marker in words may stand in any text.
    return text.begin or None if marker and marker[0].isalpha() else marker


def _tag(text: CallText, tool: Tool) -> dict[str, Any]:
    begin, _, end = text.call.replace("$name", tool.name).partition("$arguments")
    content = {"type": "json_schema", "json_schema": arguments_schema(tool), "strict": tool.strict}
    return {"begin": begin, "content": content, "end": end}


def _harmony(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the format of messages, which are text or calls; the prompt began the first one.

    A recipient stands before or behind the channel. A message without a recipient is text.
    """
    # The last message ends with a token that ends the turn.
    texts = [
        {
            "begin": f"{harmony.CHANNEL}{channel}{harmony.MESSAGE}",
            "content": {"type": "any_text"},
            "end": end,
        }
        for channel in ("analysis", "commentary", "final")
        for end in (harmony.END, "")
    ]
    channel = f"{harmony.CHANNEL}commentary"
    early = [call | {"begin": _recipient_first(call["begin"], channel)} for call in calls]
    return {
        "type": "tags_with_separator",
        "tags": [*texts, *calls, *early],
        "separator": harmony.ASSISTANT,
        "at_least_one": True,
    }


def _recipient_first(header: str, channel: str) -> str:
    """Return the header of a call with its recipient before the channel."""
    recipient, constrain, rest = header.removeprefix(channel).partition(f" {harmony.CONSTRAIN}")
    return f"{recipient}{channel}{constrain}{rest}"
