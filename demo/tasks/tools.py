"""Calls of tools with the right arguments, and sentences about their results."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from demo.example import Example, Message, Tool, ToolCall, assistant, user
from demo.tasks.tool_families import FAMILIES
from demo.tasks.tool_library import (
    Offer,
    explicit_offer,
    family_offer,
    several_offers,
)
from demo.words import any_word, identifier

_ARITHMETIC = ("Add two numbers", "Multiply two numbers", "Evaluate an arithmetic expression")
_LISTED = (
    "Get the current weather in a city",
    "Get the current time in a city",
    "Get the price of a stock",
    "Get the capital of a country",
)
_TEXT_TOOLS = ("Get the capital of a country", "Search the web")
NO_TOOL = "I have no tool for that."
_CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "stormy")


def _offers(rng: Random, count: int) -> list[Offer]:
    """Return offers of different tools; the first may be for any purpose."""
    chosen = rng.sample(FAMILIES, count)
    sums = [family for family in chosen if family.about in _ARITHMETIC]
    chosen = [family for family in chosen if family not in sums[1:]]
    offers = [
        explicit_offer(rng) if rng.random() < 0.4 else family_offer(rng, family)
        for family in chosen
    ]
    by_name = {offer.call.name: offer for offer in reversed(offers)}
    return list(by_name.values())[::-1]


def tool_set(rng: Random) -> tuple[Tool, ...]:
    """Return a few tools that no question of the other tasks calls for."""
    others = [family for family in FAMILIES if family.about not in _ARITHMETIC + _TEXT_TOOLS]
    offers = [
        explicit_offer(rng) if rng.random() < 0.4 else family_offer(rng, rng.choice(others))
        for _ in range(rng.randint(1, 3))
    ]
    return tuple({offer.call.name: offer.tool for offer in offers}.values())


def no_tool(rng: Random) -> Example:
    """Return a request for a tool that is not among those on offer, if any are."""
    known = _ARITHMETIC + _TEXT_TOOLS
    chosen = rng.sample([family for family in FAMILIES if family.about not in known], 3)
    wanted, *offers = [family_offer(rng, family) for family in chosen]
    count = rng.choice((0, 1, 1, 2))
    tools = tuple(offer.tool for offer in offers[:count] if offer.call.name != wanted.call.name)
    return Example(
        task="no_tool",
        key=wanted.request,
        messages=(user(wanted.request),),
        tools=tools,
        answer=NO_TOOL,
    )


def _several_calls(rng: Random) -> Example:
    """Return a problem in which one tool is called once for each of several values."""
    listed = [family for family in FAMILIES if family.about in _LISTED]
    offers = several_offers(rng, rng.choice(listed))
    others = [explicit_offer(rng).tool for _ in range(rng.choice((0, 0, 1, 2)))]
    tools = [offers[0].tool, *others]
    rng.shuffle(tools)
    return Example(
        task="tool_call",
        key=f"{[offer.call for offer in offers]}",
        messages=(user(offers[0].request),),
        tools=tuple(tools),
        calls=tuple(offer.call for offer in offers),
        check="calls",
    )


def tool_call(rng: Random) -> Example:
    """Return a problem with one or more calls of one to four tools, at times after an exchange."""
    if rng.random() < 0.08:
        return _several_calls(rng)
    offers = _offers(rng, rng.choices((1, 2, 3, 4), (0.35, 0.35, 0.2, 0.1))[0])
    wanted = offers[: 2 if len(offers) > 1 and rng.random() < 0.12 else 1]
    history = _exchange(rng, offers[-1]) if len(offers) > len(wanted) and rng.random() < 0.2 else ()
    tools = [offer.tool for offer in offers]
    rng.shuffle(tools)
    request = rng.choice((" ", " Also, ", " And then: ")).join(offer.request for offer in wanted)
    return Example(
        task="tool_call",
        key=f"{[offer.call for offer in wanted]}",
        messages=(*history, user(request)),
        tools=tuple(tools),
        calls=tuple(offer.call for offer in wanted),
        check="calls",
    )


def tool_result(rng: Random) -> Example:
    """Return the sentence that reports a tool's result."""
    offers = _offers(rng, rng.choices((1, 2, 3), (0.6, 0.3, 0.1))[0])
    content, answer, expected = _result(rng)
    tools = [offer.tool for offer in offers]
    rng.shuffle(tools)
    return Example(
        task="tool_result",
        key=content,
        messages=(
            user(offers[0].request),
            _call_message(rng, offers[0].call),
            _tool_message(content),
        ),
        tools=tuple(tools),
        answer=answer,
        check="contains",
        expected=expected,
    )


def _exchange(rng: Random, offer: Offer) -> tuple[Message, ...]:
    content, answer, _ = _result(rng)
    return (
        user(offer.request),
        _call_message(rng, offer.call),
        _tool_message(content),
        assistant(answer),
    )


def _call_message(rng: Random, call: ToolCall) -> Message:
    arguments: Any = call.arguments
    if rng.random() < 0.5:
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


def _tool_message(content: str) -> Message:
    return {"role": "tool", "tool_call_id": "call_0", "content": content}


def _result(rng: Random) -> tuple[str, str, tuple[str, ...]]:
    """Return a tool's result, the sentence about it, and the values the sentence must contain."""
    style = rng.random()
    if style < 0.3:
        value = _plain_value(rng)
        return str(value), f"The result is {value}.", (str(value),)
    if style < 0.45:
        fields = {"temperature": rng.randint(-20, 40), "condition": rng.choice(_CONDITIONS)}
        fields = dict(rng.sample(list(fields.items()), rng.randint(1, 2)))
    else:
        usual = ("result", "status", "value", "price", "time", "name", "distance", "total", "id")
        names = [any_word(rng) if rng.random() < 0.5 else rng.choice(usual)
                 for _ in range(rng.randint(1, 4))]  # fmt: skip
        fields = {name: _plain_value(rng) for name in names}
    parts = [f"the {name} is {value}" for name, value in fields.items()]
    sentence = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    expected = tuple(str(value) for value in fields.values())
    separators = rng.choice((None, None, (",", ":")))
    content = json.dumps(fields, separators=separators)
    return content, sentence[:1].upper() + sentence[1:] + ".", expected


def _plain_value(rng: Random) -> str | int | float:
    style = rng.random()
    if style < 0.4:
        return rng.randrange(10 ** rng.randint(1, 6))
    if style < 0.5:
        return rng.randrange(10000) / 100
    return identifier(rng) if style < 0.6 else any_word(rng)
