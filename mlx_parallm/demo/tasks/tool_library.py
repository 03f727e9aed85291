"""Tools that the generated conversations offer, with ways of asking for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from mlx_parallm.demo.example import Tool, ToolCall
from mlx_parallm.demo.phrasing import phrase
from mlx_parallm.demo.words import (
    ADJECTIVES,
    COMMON_NOUNS,
    COUNTRIES,
    FOODS,
    LANGUAGES,
    OBJECTS,
    WEEKDAYS,
    any_city,
    any_name,
    any_word,
    identifier,
    odd_word,
    sentence,
)

Maker = Callable[[Random], Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a family: the names it may have, its JSON schema, and a maker of values."""

    names: tuple[str, ...]
    schema: dict[str, Any]
    make: Maker
    about: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """Tools of one purpose. Requests name values by parameter place: {0}, {1} and so on.

    ``extra`` requests use all parameters; plain ``requests`` all but the last one, which is
    optional, where ``extra`` is given.
    """

    names: tuple[str, ...]
    about: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool, and a request that it answers by ``call``."""

    tool: Tool
    request: str
    call: ToolCall


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _text(names: str, make: Maker, about: str = "") -> Parameter:
    return Parameter(_names(names), {"type": "string"}, make, about)


def _whole(names: str, low: int, high: int, about: str = "") -> Parameter:
    return Parameter(_names(names), {"type": "integer"}, lambda r: r.randint(low, high), about)


def _enum(names: str, *values: str) -> Parameter:
    schema = {"type": "string", "enum": list(values)}
    return Parameter(_names(names), schema, lambda r: r.choice(values))


def _topic(rng: Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(COMMON_NOUNS)}s"


def _time(rng: Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 15, 30, 45)):02d}"


def _price(rng: Random) -> float | int:
    return rng.choice((rng.randint(1, 999), rng.randrange(11, 999) / 10))


def _mail(rng: Random) -> str:
    return f"{any_name(rng).lower()}@{rng.choice(('example.com', 'mail.org', 'test.net'))}"


def _path(rng: Random) -> str:
    folder = rng.choice(("/tmp", "/home", "docs", "data", "src"))
    return f"{folder}/{any_word(rng)}.{rng.choice(('txt', 'json', 'py', 'csv'))}"


def _product(rng: Random) -> str:
    return f"{rng.randint(2, 999)} {rng.choice('+-*/')} {rng.randint(2, 999)}"


def _room(rng: Random) -> str:
    return rng.choice(("kitchen", "bedroom", "bathroom", "hall", "office", "garage", "garden"))


def _currency(rng: Random) -> str:
    return rng.choice(("USD", "EUR", "GBP", "JPY", "CHF", "INR", "CAD", "AUD", "CNY", "SEK"))


def _order_id(rng: Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return f"order_{rng.randrange(100, 99999)}"
    return identifier(rng) if kind == 1 else str(rng.randrange(10**6))


def _ticker(rng: Random) -> str:
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 4)))


def families() -> tuple[Family, ...]:
    """The families of tools with a purpose of their own."""
    number = Parameter(("amount", "value", "sum"), {"type": "number"}, _price)
    return (
        Family(
            _names("get_weather weather fetch_weather current_weather get_current_weather"),
            "Get the current weather in a city",
            (_text("city location place town", any_city, "The city and country, e.g. Paris, France"),
             _enum("unit units scale", "celsius", "fahrenheit")),
            ("What is the weather in {0}?", "What's the weather like in {0}?", "Weather in {0}?",
             "How is the weather in {0} today?", "Is it raining in {0}?", "How warm is it in {0}?",
             "What is the weather like in {0} today?", "What's the weather in {0}?"),
            ("What is the weather in {0} in {1}?", "Tell me the temperature in {0} in {1}.",
             "How warm is it in {0}? Use {1}."),
        ),
        Family(
            _names("add add_numbers sum get_sum plus"),
            "Add two numbers",
            (_whole("a x first left", 0, 999), _whole("b y second right", 0, 999)),
            ("Add {0} and {1}.", "What is {0} + {1}?", "What is the sum of {0} and {1}?",
             "What is {0} plus {1}?", "Use the tool to add {0} and {1}."),
        ),
        Family(
            _names("multiply multiply_numbers product times"),
            "Multiply two numbers",
            (_whole("a x first left", 0, 999), _whole("b y second right", 0, 999)),
            ("Multiply {0} by {1}.", "What is {0} * {1}?", "What is {0} times {1}?"),
        ),
        Family(
            _names("calculator calculate evaluate compute eval_expression"),
            "Evaluate an arithmetic expression",
            (_text("expression expr formula input", _product),),
            ("What is {0}?", "Calculate {0}.", "Compute {0}.", "Evaluate {0}.", "How much is {0}?"),
        ),
        Family(
            _names("send_email email send_mail mail"),
            "Send an email",
            (_text("to recipient address", _mail, "Address of the recipient"),
             _text("subject title topic", _topic)),
            ("Send an email to {0} about {1}.", "Email {0} with the subject {1}.",
             "Write a mail to {0} about {1}."),
        ),
        Family(
            _names("send_message message text_contact send_sms"),
            "Send a message to a contact",
            (_text("to contact recipient name", any_name), _text("text message body", sentence)),
            ('Send {0} the message "{1}"', "Tell {0}: {1}", 'Text {0}: "{1}"'),
        ),
        Family(
            _names("set_timer timer start_timer countdown"),
            "Start a timer",
            (_whole("minutes duration length", 1, 120, "Minutes"),),
            ("Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Timer for {0} minutes."),
        ),
        Family(
            _names("set_alarm alarm wake_up create_alarm"),
            "Set an alarm",
            (_text("time at when", _time, "Time as HH:MM"),),
            ("Set an alarm for {0}.", "Wake me up at {0}.", "I need an alarm at {0}."),
        ),
        Family(
            _names("search web_search search_web find lookup"),
            "Search the web",
            (_text("query q text keywords", _topic, "What to look for"),
             _whole("limit count max_results", 1, 20)),
            ("Search for {0}.", "Search the web for {0}.", "Find {0} on the web."),
            ("Search for {0} and show {1} results.", "Find {1} results about {0}."),
        ),
        Family(
            _names("convert_currency currency exchange convert_money"),
            "Convert money from one currency to another",
            (number, _text("from source from_currency", _currency), _text("to target to_currency", _currency)),
            ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "Exchange {0} {1} into {2}."),
        ),
        Family(
            _names("translate translate_text translation"),
            "Translate a text",
            (_text("text input sentence", sentence),
             Parameter(("language", "target", "to"), {"type": "string"}, lambda r: r.choice(LANGUAGES))),
            ('Translate "{0}" to {1}.', 'How do you say "{0}" in {1}?', "Translate into {1}: {0}"),
        ),
        Family(
            _names("create_event add_event schedule_meeting calendar_add"),
            "Put an event in the calendar",
            (_text("title name event", lambda r: f"{any_word(r)} {r.choice(('party', 'meeting', 'lunch'))}"),
             Parameter(("day", "date", "weekday"), {"type": "string"}, lambda r: r.choice(WEEKDAYS)),
             _text("time start hour", _time)),
            ("Schedule a {0} on {1}.", "Put a {0} in my calendar on {1}."),
            ("Schedule a {0} on {1} at {2}.", "Plan a {0} for {1} at {2}."),
        ),
        Family(
            _names("get_stock_price stock_price quote get_quote"),
            "Get the price of a stock",
            (_text("symbol ticker stock", _ticker, "Ticker symbol"),),
            ("What is the stock price of {0}?", "How much is {0} stock?", "Get me a quote for {0}."),
        ),
        Family(
            _names("set_light light switch_light control_light"),
            "Switch a light",
            (_text("room place location", _room), _enum("state mode action", "on", "off")),
            ("Turn {1} the light in the {0}.", "Switch the {0} light {1}.", "Turn the {0} lights {1}."),
        ),
        Family(
            _names("set_temperature thermostat set_heating heat"),
            "Set the temperature of a room",
            (_text("room place zone", _room), _whole("degrees temperature value", 10, 30)),
            ("Set the {0} to {1} degrees.", "Heat the {0} to {1} degrees."),
        ),
        Family(
            _names("get_user find_user user_info lookup_user"),
            "Get a user by id",
            (_whole("user_id id uid", 1, 9999),),
            ("Show me user {0}.", "Get the user with id {0}.", "Who is user {0}?"),
        ),
        Family(
            _names("get_time current_time time_in clock"),
            "Get the current time in a city",
            (_text("city location place", any_city),),
            ("What time is it in {0}?", "Tell me the time in {0}.", "Current time in {0}?"),
        ),
        Family(
            _names("get_distance distance route measure_distance"),
            "Get the distance between two cities",
            (_text("from start origin", any_city), _text("to end destination", any_city)),
            ("How far is it from {0} to {1}?", "What is the distance between {0} and {1}?"),
        ),
        Family(
            _names("order_food order place_order buy"),
            "Order food",
            (Parameter(("item", "dish", "product"), {"type": "string"}, lambda r: r.choice(FOODS)),
             _whole("quantity count amount", 2, 20)),
            ("Order {1} {0}s.", "I would like {1} {0}s.", "Please buy {1} {0}s."),
        ),
        Family(
            _names("random_number random pick_number randint"),
            "Draw a random number",
            (_whole("min low start", 0, 50), _whole("max high end", 51, 1000)),
            ("Give me a random number between {0} and {1}.", "Pick a number from {0} to {1}."),
        ),
        Family(
            _names("read_file open_file load_file cat"),
            "Read a file",
            (_text("path file filename", _path),),
            ("Read {0}.", "Open the file {0}.", "Show me {0}.", "What is in {0}?"),
        ),
        Family(
            _names("get_news news headlines"),
            "Get the news about a topic",
            (Parameter(("topic", "about", "subject"), {"type": "string"}, lambda r: r.choice(COMMON_NOUNS)),
             Parameter(("country", "region"), {"type": "string"}, lambda r: r.choice(COUNTRIES))),
            ("Show me news about {0}.", "What is the news on {0}?"),
            ("Show me news about {0} from {1}.", "What is the news on {0} in {1}?"),
        ),
        Family(
            _names("get_capital lookup_capital capital capital_of"),
            "Get the capital of a country",
            (
                Parameter(
                    _names("country name state"),
                    {"type": "string"},
                    lambda r: r.choice(COUNTRIES),
                ),
            ),
            (
                "What is the capital of {0}?",
                "What's the capital of {0}?",
                "Look up the capital of {0}.",
                "Capital of {0}?",
            ),
        ),
        Family(
            _names("get_delivery_date track_order order_status get_order"),
            "Get the delivery date or the status of an order",
            (_text("order_id id order", _order_id, "The customer's order ID."),),
            (
                "Where is my order {0}?",
                "When will order {0} arrive?",
                "What is the status of order {0}?",
                "When do I get my order {0}?",
                "Track order {0}.",
            ),
        ),
        Family(
            _names("add_todo create_task remember_task new_todo"),
            "Add a task to the list",
            (_text("text task title", lambda r: f"{r.choice(('buy', 'fix', 'clean'))} the {r.choice(OBJECTS)}"),),
            ("Add a task: {0}", "Remind me to {0}.", "Put this on my list: {0}"),
        ),
    )  # fmt: skip


def several_offers(rng: Random, family: Family) -> tuple[Offer, ...]:
    """Offers of one tool whose first parameter is asked for with two to four values at once."""
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
    """A tool of the family under some names, a request for it and the right call."""
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
    """A tool nobody has heard of, asked for by name and parameter."""
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
