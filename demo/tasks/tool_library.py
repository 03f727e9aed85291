"""Tools on offer in the generated conversations, with a request that each one answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from demo.example import Tool, ToolCall
from demo.phrasing import phrase
from demo.tasks.tool_families import Family
from demo.tasks.tool_parameters import Parameter
from demo.words import any_city, any_name, any_word, identifier, odd_word


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool, and a request that it answers by ``call``."""

    tool: Tool
    request: str
    call: ToolCall


def several_offers(rng: Random, family: Family) -> tuple[Offer, ...]:
    """Return offers of a tool, one for each of two to four values of its first parameter."""
    plain = replace(family, parameters=family.parameters[:1], extra=())
    first = family_offer(rng, plain)
    name = next(iter(first.call.arguments))
    values = list(dict.fromkeys(family.parameters[0].make(rng) for _ in range(rng.randint(2, 4))))
    joined = ", ".join(values[:-1]) + rng.choice((" and ", ", and ")) + values[-1]
    request = phrase(rng, family.requests, joined if len(values) > 1 else values[0])
    return tuple(
        Offer(first.tool, request, ToolCall(first.call.name, {name: value})) for value in values
    )


def family_offer(rng: Random, family: Family) -> Offer:
    """Return a tool of the family under some names, a request for it and the right call."""
    names = _distinct_names(rng, family.parameters)
    optional = 1 if family.extra else 0
    use_all = bool(family.extra) and rng.random() < 0.5
    properties = {
        name: _described(rng, parameter)
        for name, parameter in zip(names, family.parameters, strict=True)
    }
    required = names[: len(names) - optional]
    tool = _tool(rng, rng.choice(family.names), family.about, properties, required)
    values = [parameter.make(rng) for parameter in family.parameters]
    request = phrase(rng, family.extra if use_all else family.requests, *values)
    used = names if use_all else required
    arguments = dict(zip(used, values, strict=False))
    return Offer(tool, request, ToolCall(tool["function"]["name"], arguments))


def _distinct_names(rng: Random, parameters: tuple[Parameter, ...]) -> list[str]:
    names: list[str] = []
    for parameter in parameters:
        names.append(rng.choice([name for name in parameter.names if name not in names]))
    return names


def _described(rng: Random, parameter: Parameter) -> dict[str, Any]:
    if parameter.about and rng.random() < 0.5:
        return {**parameter.schema, "description": parameter.about}
    return dict(parameter.schema)


def _tool(
    rng: Random, name: str, about: str, properties: dict[str, Any], required: list[str]
) -> Tool:
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.85:
        parameters["required"] = list(required)
    if rng.random() < 0.1:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if about and rng.random() < 0.85:
        function["description"] = about + rng.choice(("", "", "."))
    function["parameters"] = parameters
    return {"type": "function", "function": function}


_EXPLICIT = (
    "Call {n} with {p}.",
    "Use {n} with {p}.",
    "Run {n} with {p}.",
    "Please use the {n} tool with {p}.",
    "Use the tool {n}: {p}",
    "{n}: {p}",
)


def explicit_offer(rng: Random) -> Offer:
    """Return a tool nobody has heard of, asked for by name and parameter."""
    verb = rng.choice(("get", "set", "run", "make", "find", odd_word(rng).lower()))
    noun = any_word(rng).lower()
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", odd_word(rng).lower(), f"{noun}_{verb}"))
    names = list(dict.fromkeys(any_word(rng) for _ in range(rng.randint(1, 4))))
    kinds = [rng.choice(_KINDS) for _ in names]
    made = {name: kind(rng) for name, kind in zip(names, kinds, strict=True)}
    properties = {name: schema for name, (schema, _) in made.items()}
    used = {name: value for name, (_, value) in made.items() if rng.random() < 0.85}
    used = used or {names[0]: made[names[0]][1]}
    tool = _tool(rng, name, f"{verb.capitalize()} the {noun}", properties, list(used))
    shown = _shown_arguments(rng, used)
    if rng.random() < 0.3 and "description" in tool["function"]:
        request = phrase(rng, ("{v} the {n} with {p}.",), v=verb.capitalize(), n=noun, p=shown)
    else:
        request = phrase(rng, _EXPLICIT, n=name, p=shown)
    return Offer(tool, request, ToolCall(name, used))


def _shown_arguments(rng: Random, arguments: dict[str, Any]) -> str:
    style = rng.choice((" = ", "=", " ", " set to ", ": "))
    pairs = [
        f"{name}{style}{value if isinstance(value, str) else json.dumps(value)}"
        for name, value in arguments.items()
    ]
    if len(pairs) > 1 and rng.random() < 0.6:
        return ", ".join(pairs[:-1]) + " and " + pairs[-1]
    return ", ".join(pairs)


def _any_integer(rng: Random) -> tuple[dict[str, Any], int]:
    return {"type": "integer"}, rng.randrange(10 ** rng.randint(1, 4))


def _any_number(rng: Random) -> tuple[dict[str, Any], float]:
    return {"type": "number"}, rng.randrange(1, 1000) / 10


def _any_flag(rng: Random) -> tuple[dict[str, Any], bool]:
    return {"type": "boolean"}, rng.random() < 0.5


def _any_string(rng: Random) -> tuple[dict[str, Any], str]:
    make = rng.choice((any_word, any_word, any_name, any_city, identifier))
    return {"type": "string"}, make(rng) if rng.random() < 0.9 else str(rng.randrange(10000))


def _any_choice(rng: Random) -> tuple[dict[str, Any], str]:
    values = list(dict.fromkeys(any_word(rng) for _ in range(rng.randint(2, 4))))
    return {"type": "string", "enum": values}, rng.choice(values)


_KINDS = (_any_string, _any_string, _any_string, _any_integer, _any_integer, _any_number,
          _any_flag, _any_choice)  # fmt: skip
