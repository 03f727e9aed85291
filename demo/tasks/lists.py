"""Sorting and counting."""

from __future__ import annotations

from random import Random

from demo.example import TABLE, Example, user
from demo.phrasing import listing, phrase
from demo.words import (
    ANIMALS,
    COLOURS,
    FOODS,
    NAMES,
    OBJECTS,
    PLAIN_WORDS,
    any_word,
    odd_word,
)

_SORT_UP = (
    "Sort these numbers: {items}",
    "Sort in ascending order: {items}",
    "Sort from smallest to largest: {items}",
    "Put these numbers in order: {items}",
    "Order these from low to high: {items}",
    "Arrange in increasing order: {items}",
    "Sort {items}",
    "Sort: {items}",
    "Sort the numbers {items}",
    "Sort the following numbers: {items}",
)
_SORT_DOWN = (
    "Sort in descending order: {items}",
    "Sort from largest to smallest: {items}",
    "Order these from high to low: {items}",
    "Arrange in decreasing order: {items}",
    "Sort these numbers in reverse order: {items}",
)
_SORT_WORDS = (
    "Sort these words: {items}",
    "Sort alphabetically: {items}",
    "Put these words in alphabetical order: {items}",
    "Alphabetize: {items}",
    "Sort: {items}",
    "Sort the words {items}",
    "Sort the following words: {items}",
    "Arrange these words from A to Z: {items}",
)
_SORT_WORDS_BACK = (
    "Sort in reverse alphabetical order: {items}",
    "Arrange these words from Z to A: {items}",
    "Put these words in reverse alphabetical order: {items}",
)
_COUNT_ITEMS = (
    "How many items are in this list: {items}",
    "How many words are there here: {items}",
    "Count the items: {items}",
    "How long is this list: {items}",
    "Count these: {items}",
)
_COUNT_ONE = (
    'How many times does "{w}" appear in: {items}',
    "How often does the word {w} occur here: {items}",
    "Count the {w}s: {items}",
    "How many {w}s are in this list: {items}",
)
_COUNT_LETTER = (
    'How many times does the letter "{c}" appear in "{w}"?',
    "How many {c}'s are in {w}?",
    "How many letters {c} are in the word {w}?",
    'Count the letter {c} in "{w}".',
)
_COUNT_LETTERS = (
    'How many letters are in "{w}"?',
    "How many letters does the word {w} have?",
    "Count the letters in {w}.",
    "How long is the word {w}?",
)
_COUNT_UP = (
    "Count from {a} to {b}.",
    "Count up from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Write the numbers {a} to {b}.",
)
_COUNT_TO = ("Count to {b}.", "Count up to {b}.", "Count to {b}, please.", "Can you count to {b}?")
_NUMBER_WORDS = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine",
                 10: "ten", 12: "twelve", 15: "fifteen", 20: "twenty"}  # fmt: skip
_SPELL = ("Spell the word {w}.", "Spell {w}.", 'Spell "{w}".', "How do you spell {w}?")
_REVERSE = ("Reverse the word {w}.", 'Reverse "{w}".', "Write {w} backwards.",
            "Spell {w} backwards.",
            "What is {w} spelled backwards?")  # fmt: skip
_COUNT_DOWN = ("Count down from {a} to {b}.", "Count backwards from {a} to {b}.")
_COUNT_BY = ("Count from {a} to {b} by {s}.", "Count from {a} to {b} in steps of {s}.")


def sort_numbers(rng: Random) -> Example:
    """Return a problem that sorts three to eight numbers, up or down."""
    top = rng.choice((10, 100, 100, 1000))
    numbers = [rng.randrange(top) for _ in range(rng.randint(3, 8))]
    down = rng.random() < 0.3
    ordered = sorted(numbers, reverse=down)
    return Example(
        task="sort_numbers",
        key=f"{ordered}",
        messages=(
            user(phrase(rng, _SORT_DOWN if down else _SORT_UP, items=listing(rng, numbers))),
        ),
        answer=", ".join(map(str, ordered)),
    )


def sort_words(rng: Random) -> Example:
    """Return a problem that sorts three to six ordinary words, also in reverse."""
    words = rng.sample(PLAIN_WORDS if rng.random() < 0.8 else NAMES, rng.randint(3, 6))
    down = rng.random() < 0.2
    ordered = sorted(words, reverse=down)
    templates = _SORT_WORDS_BACK if down else _SORT_WORDS
    return Example(
        task="sort_words",
        key=" ".join(sorted(words)),
        messages=(user(phrase(rng, templates, items=listing(rng, words))),),
        answer=", ".join(ordered),
    )


def count_items(rng: Random) -> Example:
    """Return the length of a list, or how often one word occurs in it."""
    if rng.random() < 0.5:
        items = [any_word(rng) for _ in range(rng.randint(1, 12))]
        question = phrase(rng, _COUNT_ITEMS, items=listing(rng, items))
        count, word = len(items), ""
    else:
        kinds = rng.sample(rng.choice((ANIMALS, FOODS, COLOURS, OBJECTS)), rng.randint(2, 4))
        items = [rng.choice(kinds) for _ in range(rng.randint(3, 12))]
        word = rng.choice(kinds)
        question = phrase(rng, _COUNT_ONE, items=listing(rng, items), w=word)
        count = items.count(word)
    steps = _tally(items, word)
    return Example(
        task="count_items",
        key=f"{word}: {items}",
        messages=(user(question),),
        answer=str(count),
        steps=steps,
        check="number",
    )


def _tally(items: list[str], word: str) -> str:
    counted = [item for item in items if not word or item == word]
    return ", ".join(f"{number} {item}" for number, item in enumerate(counted, 1)) or "none"


def count_letters(rng: Random) -> Example:
    """Return the letters of a word, or one letter among them; thinking spells the word."""
    word = odd_word(rng) if rng.random() < 0.4 else any_word(rng)
    if rng.random() < 0.5:
        letter = rng.choice(word) if rng.random() < 0.8 else rng.choice("abcdefghijklmnoprstuvw")
        question = phrase(rng, _COUNT_LETTER, c=letter, w=word)
        count, steps = word.count(letter), _spell(word, letter)
    else:
        letter, count = "", len(word)
        question, steps = phrase(rng, _COUNT_LETTERS, w=word), _spell(word, "")
    return Example(
        task="count_letters",
        key=f"{word} {letter}",
        messages=(user(question),),
        answer=str(count),
        steps=steps,
        check="number",
    )


def _spell(word: str, letter: str) -> str:
    count, parts = 0, []
    for character in word:
        count += not letter or character == letter
        parts.append(f"{character} {count}")
    return ", ".join(parts)


def spell(rng: Random) -> Example:
    """Return a word letter by letter, or its letters in reverse; thinking spells it first."""
    word = odd_word(rng) if rng.random() < 0.4 else any_word(rng)
    if rng.random() < 0.5:
        question, answer, steps = phrase(rng, _SPELL, w=word), "-".join(word), ""
    else:
        question = phrase(rng, _REVERSE, w=word)
        answer, steps = word[::-1], " ".join(word) + "\n" + " ".join(reversed(word))
    return Example(
        task="spell",
        key=f"{word} {bool(steps)}",
        messages=(user(question),),
        answer=answer,
        steps=steps,
    )


def count_range(rng: Random) -> Example:
    """Return a problem that counts from a to b, up, down or in steps."""
    length = rng.randint(3, 20) if rng.random() < 0.9 else rng.randint(20, 100)
    start = rng.randint(0, 30) if rng.random() < 0.6 else rng.randint(0, 900)
    if rng.random() < 0.15:
        start = 1
    step = rng.choice((2, 3, 5, 10)) if rng.random() < 0.2 else 1
    numbers = [start + step * place for place in range(length)]
    first, last = numbers[0], numbers[-1]
    if step > 1:
        question = phrase(rng, _COUNT_BY, a=first, b=last, s=step)
    elif first == 1 and rng.random() < 0.6:
        shown = _NUMBER_WORDS.get(last, last) if rng.random() < 0.5 else last
        question = phrase(rng, _COUNT_TO, b=shown)
    elif rng.random() < 0.25:
        numbers.reverse()
        question = phrase(rng, _COUNT_DOWN, a=last, b=first)
    else:
        question = phrase(rng, _COUNT_UP, a=first, b=last)
    return Example(
        task="count_range",
        key=(TABLE if (first, step) == (1, 1) and last <= 20 else "") + f"{first} {last} {step}",
        messages=(user(question),),
        answer=", ".join(map(str, numbers)),
    )
