"""The mixture of tasks, and random surroundings of a problem: system prompt, turns, tools."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from demo.example import Example, Generator, Message, Split, assistant, draw
from demo.tasks import arithmetic, lists, memory, smalltalk, text, tools

TASKS: dict[str, Generator] = {
    "addition": arithmetic.addition,
    "subtraction": arithmetic.subtraction,
    "multiplication": arithmetic.multiplication,
    "three_terms": arithmetic.three_terms,
    "compare": arithmetic.compare,
    "sort_numbers": lists.sort_numbers,
    "sort_words": lists.sort_words,
    "count_items": lists.count_items,
    "count_letters": lists.count_letters,
    "count_range": lists.count_range,
    "spell": lists.spell,
    "copy": text.copy,
    "lookup_keys": text.lookup_keys,
    "lookup_table": text.lookup_table,
    "lookup_sentences": text.lookup_sentences,
    "extract_json": text.extract_json,
    "tool_call": tools.tool_call,
    "tool_result": tools.tool_result,
    "no_tool": tools.no_tool,
    "memory": memory.memory,
    "smalltalk": smalltalk.smalltalk,
}
"""Every task by its name."""

WEIGHTS: dict[str, float] = {
    "addition": 1.5,
    "subtraction": 1.5,
    "sort_numbers": 1.3,
    "sort_words": 1.5,
    "count_letters": 1.4,
    "lookup_keys": 1.4,
    "lookup_table": 1.3,
    "lookup_sentences": 1.2,
    "tool_call": 2.2,
    "smalltalk": 0.8,
    "count_range": 0.8,
    "three_terms": 0.7,
    "compare": 0.7,
    "spell": 0.9,
    "no_tool": 0.4,
    "copy": 1.6,
    "multiplication": 1.3,
}
"""Relative frequency of a task in training, where that is not 1."""

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful AI assistant.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "Be concise.",
    "You are a careful assistant. Answer correctly.",
    "You are an assistant for testing.",
    "Help the user.",
)
_EARLIER = ("smalltalk", "copy", "addition", "count_items", "sort_numbers")
_WITH_TOOLS = ("smalltalk", "copy", "memory", "lookup_keys", "sort_words", "extract_json",
               "addition", "subtraction", "sort_numbers", "count_range")  # fmt: skip


def training_example(rng: Random) -> Example:
    """Return a training example of a task drawn by weight, in varied surroundings."""
    names = tuple(TASKS)
    weights = [WEIGHTS.get(name, 1.0) for name in names]
    name = rng.choices(names, weights)[0]
    return surrounded(draw(TASKS[name], rng, "train"), rng, "train")


def surrounded(example: Example, rng: Random, split: Split) -> Example:
    """Return the example with random earlier turns, unneeded tools and a system prompt."""
    messages = list(example.messages)
    has_system = messages[0]["role"] == "system"
    if not has_system and rng.random() < 0.15:
        messages = [*_earlier_turns(rng, split), *messages]
    if not has_system and rng.random() < 0.4:
        messages.insert(0, {"role": "system", "content": rng.choice(_SYSTEM_PROMPTS)})
    offered = example.tools
    if example.task in _WITH_TOOLS and rng.random() < 0.08:
        offered = tools.tool_set(rng)
    return replace(example, messages=tuple(messages), tools=offered)


def _earlier_turns(rng: Random, split: Split) -> list[Message]:
    turns: list[Message] = []
    for _ in range(rng.choice((1, 1, 2))):
        earlier = draw(TASKS[rng.choice(_EARLIER)], rng, split)
        if earlier.messages[0]["role"] != "system":
            turns += [*earlier.messages, assistant(earlier.answer)]
    return turns
