"""Right answers to the demonstration model's exercises, each beside a plausible wrong one.

A wrong answer differs little: a digit, a word, another value of the conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo.checks import is_right
from demo.compose import TASKS
from demo.example import Example, Message, Split, assistant, draw
from demo.words import any_word

_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"[^\W\d_][\w'-]*|\d+")


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """A conversation of one of the ``EXERCISES``, and two answers to it."""

    task: str
    messages: tuple[Message, ...]
    right: str
    wrong: str

    def chats(self) -> tuple[list[Message], list[Message]]:
        """Return the conversation with the right answer, and with the wrong one."""
        start = list(self.messages)
        return [*start, assistant(self.right)], [*start, assistant(self.wrong)]


Spoil = Callable[[Random, Example], str]
"""Makes an answer wrong; may fail to, which the caller sees."""


def _another_number(rng: Random, number: str) -> str:
    value = int(number)
    kind = rng.randrange(4)
    if kind == 0 and len(number) > 1:
        place = rng.randrange(len(number) - 1)
        return number[:place] + number[place + 1] + number[place] + number[place + 2 :]
    if kind == 1:
        place = rng.randrange(len(number))
        return number[:place] + rng.choice("0123456789") + number[place + 1 :]
    return str(abs(value + rng.choice((-10, -2, -1, 1, 2, 10))))


def _wrong_number(rng: Random, example: Example) -> str:
    """Return the answer with a number changed; for sums it is the last one, the result."""
    matches = list(_NUMBER.finditer(example.answer))
    if not matches:
        return example.answer
    match = matches[-1] if example.check == "number" else rng.choice(matches)
    return (
        example.answer[: match.start()]
        + _another_number(rng, match.group())
        + example.answer[match.end() :]
    )


def _from_text(rng: Random, example: Example) -> str:
    """Return the answer with a word replaced by another of its kind from the conversation."""
    text = " ".join(str(message["content"]) for message in example.messages)
    matches = list(_WORD.finditer(example.answer))
    if not matches:
        return example.answer
    # The requested value comes last.
    match = matches[-1] if rng.random() < 0.6 else rng.choice(matches)
    others = [
        word
        for word in _WORD.findall(text)
        if word != match.group()
        and word.isdigit() == match.group().isdigit()
        and word[0].isupper() == match.group()[0].isupper()
    ]
    if not others:
        return example.answer
    return example.answer[: match.start()] + rng.choice(others) + example.answer[match.end() :]


def _of_another(rng: Random, example: Example) -> str:
    """Return the answer to another problem."""
    return TASKS[example.task](rng).answer


def _wrong_values(rng: Random, example: Example) -> str:
    """Return the answer with two values of an object exchanged."""
    fields = json.loads(example.answer)
    if len(fields) < 2:
        return example.answer
    first, second = rng.sample(tuple(fields), 2)
    fields[first], fields[second] = fields[second], fields[first]
    return json.dumps(fields, ensure_ascii=False)


def _odd(rng: Random, example: Example) -> str:
    """Return the answer with a word replaced, added, or with the rest cut off after it."""
    words = list(_WORD.finditer(example.answer))
    if not words:
        return example.answer
    word, kind = rng.choice(words), rng.random()
    if kind < 0.3:
        return example.answer[: word.start()].rstrip()
    end = word.start() if kind < 0.5 else word.end()
    space = " " if kind < 0.5 else ""
    return example.answer[: word.start()] + any_word(rng) + space + example.answer[end:]


EXERCISES: dict[str, tuple[Spoil, ...]] = {
    "lookup_sentences": (_from_text, _wrong_number, _of_another, _odd),
    "extract_json": (_from_text, _wrong_number, _wrong_values, _of_another, _odd),
    "memory": (_from_text, _of_another, _odd),
    "smalltalk": (_of_another, _of_another, _odd),
}
"""The exercises whose answers the reward model judges, and how their answers are made wrong."""


def answer_pair(rng: Random, split: Split, task: str | None = None) -> AnswerPair:
    """Return a problem of an exercise with a right and a wrong answer."""
    name = task or rng.choice(tuple(EXERCISES))
    while True:
        example = draw(TASKS[name], rng, split)
        for _ in range(4):
            wrong = rng.choice(EXERCISES[name])(rng, example)
            if wrong and not is_right(example, wrong):
                return AnswerPair(name, example.messages, example.answer, wrong)
