"""Questions about earlier turns of the conversation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo.example import Example, Message, assistant, user
from demo.phrasing import phrase
from demo.words import (
    ANIMALS,
    COLOURS,
    FOODS,
    JOBS,
    MONTHS,
    any_city,
    any_name,
    any_word,
    identifier,
    sentence,
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement of a user about themselves, questions about it, and the answer."""

    make: Callable[[Random], object]
    said: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    reply: str = "OK, I will remember that."


FACTS: dict[str, Fact] = {
    "name": Fact(
        any_name,
        ("My name is {v}.", "I'm {v}.", "Call me {v}.", "Hello, I am {v}.", "Hi, my name is {v}."),
        ("What is my name?", "What did I say my name was?", "Do you remember my name?",
         "What's my name?", "Who am I?"),
        "Your name is {v}.",
        "Nice to meet you, {v}!",
    ),
    "city": Fact(
        any_city,
        ("I live in {v}.", "My home is in {v}.", "I am from {v}."),
        ("Where do I live?", "Which city do I live in?", "Where did I say I live?"),
        "You live in {v}.",
    ),
    "age": Fact(
        lambda r: r.randint(5, 95),
        ("I am {v} years old.", "I'm {v} years old.", "My age is {v}."),
        ("How old am I?", "What is my age?", "What did I say my age was?"),
        "You are {v} years old.",
    ),
    "job": Fact(
        lambda r: r.choice(JOBS),
        ("I work as a {v}.", "My job is {v}.", "I am a {v} by profession."),
        ("What is my job?", "What do I work as?", "What did I say my job was?"),
        "You work as a {v}.",
    ),
    "colour": Fact(
        lambda r: r.choice(COLOURS),
        ("My favourite colour is {v}.", "My favorite color is {v}.", "I like the colour {v} best."),
        ("What is my favourite colour?", "What's my favorite color?", "Which colour do I like?"),
        "Your favourite colour is {v}.",
    ),
    "food": Fact(
        lambda r: r.choice(FOODS),
        ("My favourite food is {v}.", "I like to eat {v}.", "My favorite food is {v}."),
        ("What is my favourite food?", "What do I like to eat?", "What's my favorite food?"),
        "Your favourite food is {v}.",
    ),
    "pet": Fact(
        any_name,
        ("My pet is called {v}.", "My pet's name is {v}.", "I have a pet called {v}."),
        ("What is my pet called?", "What is my pet's name?", "What's the name of my pet?"),
        "Your pet is called {v}.",
    ),
    "animal": Fact(
        lambda r: r.choice(ANIMALS),
        ("My favourite animal is the {v}.", "The animal I like best is the {v}."),
        ("What is my favourite animal?", "Which animal do I like best?"),
        "Your favourite animal is the {v}.",
    ),
    "month": Fact(
        lambda r: r.choice(MONTHS),
        ("My birthday is in {v}.", "I was born in {v}."),
        ("When is my birthday?", "In which month was I born?"),
        "Your birthday is in {v}.",
    ),
    "number": Fact(
        lambda r: r.randrange(10 ** r.randint(1, 4)),
        ("My lucky number is {v}.", "The number I like is {v}."),
        ("What is my lucky number?", "Which number did I say?", "What's my number?"),
        "Your lucky number is {v}.",
    ),
    "code": Fact(
        identifier,
        ("The code is {v}.", "Remember the code {v}.", "The secret code is {v}.",
         "Please remember this code: {v}"),
        ("What is the code?", "What was the code?", "Which code did I give you?",
         "What is the secret code?"),
        "The code is {v}.",
    ),
    "word": Fact(
        any_word,
        ("The password is {v}.", "The secret word is {v}.", "Remember the word {v}."),
        ("What is the password?", "What was the word?", "What is the secret word?"),
        "The word is {v}.",
    ),
}  # fmt: skip
UNKNOWN = "You have not told me that yet."


def memory(rng: Random) -> Example:
    """Return a question about an earlier statement of the user or the assistant."""
    kind = rng.random()
    if kind < 0.12:
        return _acknowledge(rng)
    if kind < 0.24:
        return _what_was_said(rng)
    return _recall(rng)


def _acknowledge(rng: Random) -> Example:
    name = rng.choice(tuple(FACTS))
    fact, value = FACTS[name], FACTS[name].make(rng)
    return _example(
        f"ack {name} {value}", [user(phrase(rng, fact.said, v=value))], fact.reply.format(v=value)
    )


def _recall(rng: Random) -> Example:
    names = rng.sample(tuple(FACTS), rng.randint(1, 5))
    values = {name: FACTS[name].make(rng) for name in names}
    messages = _told_in_turns(rng, values) if rng.random() < 0.7 else _told_at_once(rng, values)
    fact = rng.choice(names)
    answer = FACTS[fact].answer.format(v=values[fact])
    if rng.random() < 0.1:
        fact = rng.choice([name for name in FACTS if name not in values])
        answer = UNKNOWN
    _ask(rng, messages, phrase(rng, FACTS[fact].questions))
    return _example(f"{fact} {sorted(values.items())}", messages, answer)


def _told_in_turns(rng: Random, values: dict[str, object]) -> list[Message]:
    messages: list[Message] = []
    for name, value in values.items():
        fact = FACTS[name]
        if rng.random() < 0.12:
            earlier = fact.make(rng)
            messages += [
                user(phrase(rng, fact.said, v=earlier)),
                assistant(fact.reply.format(v=earlier)),
            ]
        messages += [user(phrase(rng, fact.said, v=value)), assistant(fact.reply.format(v=value))]
        if rng.random() < 0.3:
            text = sentence(rng)
            messages += [user(f"Repeat this: {text}"), assistant(text)]
    return messages


def _told_at_once(rng: Random, values: dict[str, object]) -> list[Message]:
    statements = " ".join(phrase(rng, FACTS[name].said, v=value) for name, value in values.items())
    if rng.random() < 0.4:
        return [user(statements)]
    if rng.random() < 0.3:
        return [{"role": "system", "content": f"The user says: {statements}"}]
    return [user(statements), assistant("OK, I will remember that.")]


def _ask(rng: Random, messages: list[Message], question: str) -> None:
    if messages and messages[-1]["role"] == "user":
        messages[-1] = user(f"{messages[-1]['content']} {question}")
    else:
        messages.append(user(question))


def _what_was_said(rng: Random) -> Example:
    said = [sentence(rng) for _ in range(rng.randint(1, 3))]
    messages: list[Message] = []
    for text in said:
        messages += [user(f"Repeat this: {text}"), assistant(text)]
    if rng.random() < 0.5:
        ask, text = (
            ("What did you just say?", "Say that again.", "What was your last answer?"),
            said[-1],
        )
    else:
        ask, text = ("What was your first answer?", "What did you say first?"), said[0]
    messages.append(user(phrase(rng, ask)))
    return _example(f"said {said}", messages, text)


def _example(key: str, messages: list[Message], answer: str) -> Example:
    return Example(task="memory", key=key, messages=tuple(messages), answer=answer)
