"""Rewrites of conversations, for chat templates that refuse them or leave a part of them out.

Each changes messages where they stand, by what is beside them: a conversation that goes on begins
as it did, and its cached KV is found again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_parallm.types.json_values import is_list, is_mapping

Message = Mapping[str, Any]
Messages = Sequence[Message]
Tools = Sequence[Mapping[str, Any]]
#: ``WriteCalls``: returns tool calls, each a name and its arguments, as text.
WriteCalls = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]

# SYSTEM_ROLES: of messages that say how the assistant behaves.
SYSTEM_ROLES = ("system", "developer")
# BREAK: between texts that become one.
BREAK = "\n\n"
# ACKNOWLEDGED: the assistant's turn between a tool's result and a user's turn, where a template
# wants one. opencode and pi write such a turn for Mistral's models too.
ACKNOWLEDGED = "OK."


def developers_as_systems(messages: Messages) -> list[Message]:
    """Give developers' messages the role system."""
    return [
        {**message, "role": "system"} if message.get("role") == "developer" else message
        for message in messages
    ]


def arguments_as_text(messages: Messages) -> list[Message]:
    """Write the arguments of tool calls as JSON."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def calls_as_text(messages: Messages, write: WriteCalls) -> list[Message]:
    """Write tool calls into the assistant's content, as the model writes them."""
    return [
        _with_content(
            {key: value for key, value in message.items() if key != "tool_calls"},
            _joined(_content(message), write([_named(call) for call in message["tool_calls"]])),
        )
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def calls_and_results_as_text(messages: Messages, write: WriteCalls) -> list[Message]:
    """Write tool calls as ``calls_as_text``, and their results as turns of the user."""
    return [
        {"role": "user", "content": _content(message)} if message.get("role") == "tool" else message
        for message in calls_as_text(messages, write)
    ]


def later_systems_into_users(messages: Messages) -> list[Message]:
    """Keep one system message, the first; see ``systems_into_users`` for the others.

    System messages at the beginning become one. If there is no user, all do.
    """
    has_users = any(message.get("role") == "user" for message in messages)
    first: list[Message] = []
    rest: list[Message] = []
    for message in messages:
        leads = not rest or not has_users
        if message.get("role") not in SYSTEM_ROLES or not leads:
            rest.append(message)
        elif first:
            first = [_with_content(first[0], _joined(_content(first[0]), _content(message)))]
        else:
            first = [message]
    return [*first, *systems_into_users(rest)]


def systems_into_users(messages: Messages) -> list[Message]:
    """Let each system message become a part of the user's turn before it, else of that behind it.

    Where none is beside it, it becomes a user's turn; behind the results of tools if it is before
    or between them. One without text is left out, unless the conversation has nothing else.
    """
    messages = [message for message in messages if not _is_empty_system(message)] or messages
    result: list[Message] = []
    waiting: Any = None
    for message in messages:
        role = message.get("role")
        is_system = role in SYSTEM_ROLES
        if is_system and waiting is None and result and result[-1].get("role") == "user":
            result[-1] = _with_content(result[-1], _joined(_content(result[-1]), _content(message)))
        elif is_system:
            waiting = _joined(waiting or "", _content(message))
        elif waiting is None or role == "tool":
            result.append(message)
        else:
            if role == "user":
                message = _with_content(message, _joined(waiting, _content(message)))
            else:
                result.append({"role": "user", "content": waiting})
            result.append(message)
            waiting = None
    return result if waiting is None else [*result, {"role": "user", "content": waiting}]


def _is_empty_system(message: Message) -> bool:
    is_system = message.get("role") in SYSTEM_ROLES
    texts = [part.get("text", part) for part in _parts(_content(message))]
    return is_system and not any(text.strip() if isinstance(text, str) else text for text in texts)


def system_beside_last_user(messages: Messages) -> list[Message]:
    """Put the first system message into the last user's turn if messages follow that.

    So write templates that put it there while that turn is the last message, and drop it later.
    """
    users = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    is_last = bool(users) and users[-1] == len(messages) - 1
    if not users or is_last or messages[0].get("role") not in SYSTEM_ROLES:
        return list(messages)
    user = messages[users[-1]]
    content = _joined(_content(messages[0]), _content(user))
    return [*messages[1 : users[-1]], _with_content(user, content), *messages[users[-1] + 1 :]]


def one_call_at_a_time(messages: Messages) -> list[Message]:
    """Let each of an assistant's calls be a message of its own, followed by its result."""
    result: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            result.append(message)
            continue
        end = place
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        result += _one_by_one(message, messages[place:end])
        place = end
    return result


def _one_by_one(message: Message, results: Messages) -> list[Message]:
    """Return a message with calls as one for each call; results without a call come last."""
    ids = [call.get("id") for call in message["tool_calls"]]
    left = list(results)
    written: list[Message] = []
    for place, call in enumerate(message["tool_calls"]):
        before = message if place == 0 else {"role": message["role"], "content": ""}
        written.append({**before, "tool_calls": [call]})
        own = _answer(call, left, ids)
        written += own
        left = [each for each in left if not any(each is answer for answer in own)]
    return [*written, *left]


def _answer(call: Mapping[str, Any], results: Messages, ids: Sequence[Any]) -> Messages:
    """Return the result of a call, if there is one; ``ids`` are those of all calls beside it.

    The id decides; the order does only where the call or the result has none.
    """
    id_ = call.get("id")
    named = [each for each in results if id_ is not None and each.get("tool_call_id") == id_]
    in_order = [
        each
        for each in results
        if each.get("tool_call_id") is None or (id_ is None and each["tool_call_id"] not in ids)
    ]
    return (named or in_order)[:1]


def text_before_calls(messages: Messages) -> list[Message]:
    """Let an assistant's text be a message of its own before its calls."""
    result: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and _content(message):
            calls = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
            text = {key: value for key, value in message.items() if key != "tool_calls"}
            result += [text, calls]
        else:
            result.append(message)
    return result


def answers_before_users(messages: Messages) -> list[Message]:
    """Put a turn of the assistant between a tool's result and a user's turn."""
    result: list[Message] = []
    for message in messages:
        if result and (result[-1].get("role"), message.get("role")) == ("tool", "user"):
            result.append({"role": "assistant", "content": ACKNOWLEDGED})
        result.append(message)
    return result


def joined_users(messages: Messages) -> list[Message]:
    """Join users' turns that follow each other."""
    return _joined_turns(messages, "user")


def joined_assistants(messages: Messages) -> list[Message]:
    """Join assistants' turns that follow each other."""
    return _joined_turns(messages, "assistant")


def described_tools(tools: Tools) -> list[dict[str, Any]]:
    """Give tools without a description an empty one."""
    return [_with_function(tool, _described) for tool in tools]


def described_parameters(tools: Tools) -> list[dict[str, Any]]:
    """Give tools and their parameters without a description an empty one."""
    return [_with_function(tool, lambda each: _filled(_described(each))) for tool in tools]


def _with_function(
    tool: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    function = tool.get("function")
    return {**tool, "function": change(function)} if is_mapping(function) else dict(tool)


def _described(function: Mapping[str, Any]) -> Mapping[str, Any]:
    if "description" in function:
        return function
    return {"name": function.get("name"), "description": "", **function}


def _filled(function: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = function.get("parameters")
    properties = schema.get("properties") if is_mapping(schema) else None
    if not is_mapping(schema) or not is_mapping(properties):
        return function
    filled = {
        name: {**each, "description": each.get("description", "")} if is_mapping(each) else each
        for name, each in properties.items()
    }
    return {**function, "parameters": {**schema, "properties": filled}}


def _joined_turns(messages: Messages, role: str) -> list[Message]:
    result: list[Message] = []
    for message in messages:
        if not result or message.get("role") != role or result[-1].get("role") != role:
            result.append(message)
            continue
        last = result[-1]
        content = _joined(_content(last), _content(message))
        calls = [*(last.get("tool_calls") or ()), *(message.get("tool_calls") or ())]
        result[-1] = {**last, **message, "content": content}
        if calls:
            result[-1]["tool_calls"] = calls
    return result


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not is_mapping(function) or not is_mapping(function.get("arguments")):
        return call
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _named(call: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return a call's name and its arguments."""
    function = call.get("function") or call
    arguments = function.get("arguments")
    if not is_mapping(arguments):
        arguments = {"arguments": arguments} if arguments else {}
    return str(function.get("name")), arguments


def _content(message: Message) -> Any:
    content = message.get("content")
    return "" if content is None else content


def _with_content(message: Message, content: Any) -> Message:
    return {**message, "content": content}


def _joined(first: Any, second: Any) -> Any:
    """Return two contents as one: a text, or parts if one of them has parts."""
    if isinstance(first, str) and isinstance(second, str):
        return BREAK.join(text for text in (first, second) if text)
    parts = [*_parts(first), *_parts(second)]
    border = len(_parts(first))
    texts = [part.get("text") for part in parts[border - 1 : border + 1]]
    if 0 < border < len(parts) and all(isinstance(text, str) for text in texts):
        # One part: a template may trim parts, or write nothing between them.
        parts[border - 1 : border + 1] = [{**parts[border - 1], "text": BREAK.join(texts)}]
    return parts


def _parts(content: Any) -> list[Any]:
    if is_list(content):
        return list(content)
    return [{"type": "text", "text": content}] if content else []
