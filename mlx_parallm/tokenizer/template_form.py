"""Finds out by probes, when a chat template is loaded, which conversations it takes.

Agents send conversations that some templates refuse, or write without a part of them: system
messages after the first turn, several tool calls, a user's turn after a tool's result. A template
that writes the whole probe gets its conversations as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlx_parallm.tokenizer import rewrites
from mlx_parallm.tokenizer.rewrites import Message, Messages, Tools, WriteCalls
from mlx_parallm.types.errors import InvalidRequestError

logger = logging.getLogger(__name__)

Rewrite = Callable[[Messages], list[Message]]
ToolRewrite = Callable[[Tools], list[dict[str, Any]]]
Render = Callable[[list[dict[str, Any]]], str]
# UNPROBED: the loss of a template that does not write a short question.
UNPROBED = "a question alone, so that it cannot be probed and gets conversations as they are"


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """Rewriting of conversations for a template. It can be pickled.

    Attributes:
        rewrites: are applied in order.
        losses: what the template leaves out or refuses all the same; in words.
        tools: is applied to the tools; None: they are left as they are.
    """

    rewrites: tuple[Rewrite, ...] = ()
    losses: tuple[str, ...] = ()
    tools: ToolRewrite | None = None

    def fit_tools(self, tools: Tools) -> list[dict[str, Any]]:
        """Return tools as the template takes them."""
        return [dict(tool) for tool in (tools if self.tools is None else self.tools(tools))]

    def fit(self, messages: Messages) -> list[dict[str, Any]]:
        """Return messages as the template takes them."""
        for rewrite in self.rewrites:
            messages = rewrite(messages)
        return [dict(message) for message in messages]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """A conversation that a template may not take.

    Attributes:
        what: the part that it may lack.
        messages: whose texts are words that no template writes by itself.
        rewrites: the first one that helps is chosen.
        checked: a longer conversation, which must be written too after the rewrite.
        has_calls: nothing is said about a template that writes no tool calls at all.
        comes_first: the rewrite is applied before all others.
    """

    what: str
    messages: Messages
    rewrites: tuple[Rewrite, ...]
    checked: Messages = ()
    has_calls: bool = False
    comes_first: bool = False


def probed_form(render: Render, write_calls: WriteCalls | None = None) -> TemplateForm:
    """Return how conversations are rewritten for a template.

    Args:
        render: applies the template; raises InvalidRequestError if that refuses the messages.
        write_calls: writes tool calls as the model does, if the template writes none.
    """
    form = TemplateForm()
    if not _writes(render, form, _QUESTION):
        # It wants variables or roles of its own: nothing more can be said about it.
        return TemplateForm(losses=(UNPROBED,))
    calls = _CALLS
    if write_calls is not None:
        as_text = (rewrites.calls_as_text, rewrites.calls_and_results_as_text)
        written = (partial(rewrite, write=write_calls) for rewrite in as_text)
        calls = replace(calls, rewrites=(*calls.rewrites, *written))
    probes = (calls, *_PROBES)
    for probe in probes:
        if not (probe.has_calls and _CALLS.what in form.losses):
            form = _extended(form, probe, render)
    # A later rewrite may have helped with an earlier probe too.
    helped = {
        probe.what
        for probe in probes
        if _writes(render, form, probe.messages) and _writes(render, form, probe.checked)
    }
    return replace(form, losses=tuple(loss for loss in form.losses if loss not in helped))


def log_losses(name: str, losses: Sequence[str]) -> None:
    """Log what the chat template of a model leaves out, if anything."""
    if losses:
        logger.warning(
            "The chat template of %s refuses or leaves out: %s.", name, "; ".join(losses)
        )


def probed_tools(render: Render) -> ToolRewrite | None:
    """Return what is applied to tools; None if the template takes them as they are.

    Args:
        render: writes a question with tools; raises InvalidRequestError if they are refused.
    """
    for rewrite in (None, rewrites.described_tools, rewrites.described_parameters):
        try:
            text = render(TemplateForm(tools=rewrite).fit_tools(_TOOLS))
        except InvalidRequestError:
            continue
        if _TOOL_NAME in text:
            return rewrite
    return None


def _extended(form: TemplateForm, probe: _Probe, render: Render) -> TemplateForm:
    """Return a form that also has the rewrite which lets the template write a probe."""
    if _writes(render, form, probe.messages):
        return form
    for rewrite in probe.rewrites:
        before, after = ((rewrite,), ()) if probe.comes_first else ((), (rewrite,))
        longer = replace(form, rewrites=(*before, *form.rewrites, *after))
        if _writes(render, longer, probe.messages) and _writes(render, longer, probe.checked):
            return longer
    return replace(form, losses=(*form.losses, probe.what))


def _writes(render: Render, form: TemplateForm, messages: Messages) -> bool:
    """True if the template writes every word of a conversation."""
    if not messages:
        return True
    try:
        text = render(form.fit(messages))
    except InvalidRequestError:
        return False
    return all(word in text for word in _words(messages))


def _words(messages: Messages) -> list[str]:
    words = [message["content"] for message in messages if message["content"]]
    for message in messages:
        for call in message.get("tool_calls", ()):
            words += call["function"]["arguments"].values()
    return words


def _said(role: str, word: str) -> Message:
    return {"role": role, "content": word}


def _called(*words: str, text: str = "") -> Message:
    calls = [
        {
            "id": _call_id(word),
            "type": "function",
            "function": {"name": "probe", "arguments": {"value": word}},
        }
        for word in words
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _result(called: str, word: str) -> Message:
    return {"role": "tool", "tool_call_id": _call_id(called), "name": "probe", "content": word}


def _call_id(word: str) -> str:
    """Return an id of nine letters, as Mistral's templates want it."""
    return f"{word:x<9}"[:9]


_ONE_CALL = (_said("user", "uaq"), _called("caq"), _result("caq", "raq"))
_TOOL_NAME = "tbq"
#: ``_TOOLS``: a tool without a description, as OpenAI's API takes it.
_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": _TOOL_NAME,
            "parameters": {"type": "object", "properties": {"value": {"type": "string"}}},
        },
    },
)
_QUESTION = (_said("user", "uaq"),)
_TEXT_AND_CALL = (_said("user", "uaq"), _called("caq", text="taq"), _result("caq", "raq"))
_CALLS = _Probe(
    what="tool calls", messages=_ONE_CALL, rewrites=(rewrites.arguments_as_text,), has_calls=True
)
#: ``_PROBES``: behind that of calls, in the order in which their rewrites are applied; each builds
#: on those before it.
_PROBES = (
    _Probe(
        what="a system message after the first turn",
        messages=(
            *(_said("system", "saq"), _said("system", "sbq"), _said("user", "uaq")),
            *(_said("assistant", "aaq"), _said("system", "scq"), _said("user", "ubq")),
            *(_said("system", "sdq"), _said("assistant", "abq"), _said("user", "ucq")),
            _said("system", "seq"),
        ),
        rewrites=(rewrites.later_systems_into_users, rewrites.systems_into_users),
    ),
    _Probe(
        what="a developer's message",
        messages=(_said("developer", "daq"), _said("user", "uaq")),
        rewrites=(rewrites.developers_as_systems,),
        comes_first=True,
    ),
    _Probe(
        what="the system message behind a tool call",
        messages=(_said("system", "saq"), *_ONE_CALL),
        rewrites=(rewrites.system_beside_last_user,),
        has_calls=True,
    ),
    _Probe(
        what="several tool calls in a turn",
        messages=(
            *(_said("user", "uaq"), _called("caq", "cbq")),
            *(_result("caq", "raq"), _result("cbq", "rbq")),
        ),
        rewrites=(rewrites.one_call_at_a_time,),
        has_calls=True,
    ),
    _Probe(
        what="text beside a tool call",
        messages=_TEXT_AND_CALL,
        rewrites=(rewrites.text_before_calls,),
        checked=(*_TEXT_AND_CALL, _said("assistant", "aaq"), _said("user", "ubq")),
        has_calls=True,
    ),
    _Probe(
        what="users' turns in a row",
        messages=(_said("user", "uaq"), _said("user", "ubq")),
        rewrites=(rewrites.joined_users,),
    ),
    _Probe(
        what="assistants' turns in a row",
        messages=(
            *(_said("user", "uaq"), _said("assistant", "aaq")),
            *(_said("assistant", "abq"), _said("user", "ubq")),
        ),
        rewrites=(rewrites.joined_assistants,),
    ),
    _Probe(
        what="a user's turn after a tool's result",
        messages=(*_ONE_CALL, _said("user", "ubq")),
        rewrites=(rewrites.answers_before_users,),
        has_calls=True,
    ),
)
