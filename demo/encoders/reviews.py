"""Short reviews with their sentiment: negation, contrast, hearsay and expectations.

The sentiment follows from how a review is built, never from one word alone: most reviews that
have a contrast name praise and blame alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from demo.example import Split
from demo.words import COMMON_NOUNS

POSITIVE, NEGATIVE = 1, 0


@dataclass(frozen=True, slots=True)
class Review:
    """A text and its sentiment, ``POSITIVE`` or ``NEGATIVE``."""

    text: str
    label: int


@dataclass(frozen=True, slots=True)
class Words:
    """The words that a review may draw on.

    Attributes:
        things: the reviewed things.
        adjectives: adjectives by sentiment.
        verbs: past tense and infinitive of verbs, by sentiment.
    """

    things: tuple[str, ...]
    adjectives: tuple[tuple[str, ...], tuple[str, ...]]
    verbs: tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _verbs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((past, base) for past, base in (pair.split("/") for pair in text.split()))


_THINGS = _words(
    """soup pizza salad cake coffee tea bread cheese pasta fish juice meal dinner lunch breakfast
    waiter room bed kitchen hotel garden museum library school market train bus boat book story
    song film play concert camera phone lamp radio screen keyboard robot coat hat shirt guitar
    piano teacher doctor guide driver"""
)
_HELD_OUT_THINGS = _words(
    """pie rice honey kettle castle island bridge umbrella violin laptop wallet tent actor singer
    baker"""
)
_PLAIN = (
    _words("""terrible awful horrible dreadful bad poor boring dull disappointing unpleasant weak
    annoying"""),
    _words("""great wonderful excellent superb good lovely fantastic brilliant pleasant charming
    delightful nice"""),
)
# _HELD_OUT_ADJECTIVES occur in training only in reviews of a single clause.
_HELD_OUT_ADJECTIVES = (
    _words("nasty tedious mediocre useless lousy miserable"),
    _words("amazing perfect impressive enjoyable splendid marvellous"),
)
_VERBS = (
    _verbs("hated/hate disliked/dislike regretted/regret despised/despise"),
    _verbs("loved/love enjoyed/enjoy adored/adore admired/admire liked/like"),
)

TRAIN_WORDS = Words(_THINGS, _PLAIN, _VERBS)
HELD_OUT_WORDS = Words(_HELD_OUT_THINGS, _HELD_OUT_ADJECTIVES, _VERBS)
_EVERY_ADJECTIVE = tuple(_PLAIN[label] + _HELD_OUT_ADJECTIVES[label] for label in range(2))
_MANY_THINGS = tuple(noun for noun in COMMON_NOUNS if noun not in _HELD_OUT_THINGS)
# MANY_WORDS has so many things that the subject of a review cannot matter.
MANY_WORDS = Words(_MANY_THINGS, _PLAIN, _VERBS)
_EVERY_WORD = Words(_THINGS, (_EVERY_ADJECTIVE[0], _EVERY_ADJECTIVE[1]), _VERBS)

_DEGREES = ("", "", "", "very ", "really ", "quite ", "so ", "simply ")
_VERBS_OF_BEING = ("was", "was", "is", "seemed", "looked")
_DENIALS = (
    "the {t} was not {a}",
    "the {t} was not {a} at all",
    "the {t} was never {a}",
    "the {t} was hardly {a}",
    "the {t} was far from {a}",
    "the {t} was anything but {a}",
    "the {t} was not {a} in any way",
    "nobody would call the {t} {a}",
    "there was nothing {a} about the {t}",
)
_DENIED_VERBS = (
    "I did not {v} the {t}",
    "I never {p} the {t}",
    "I could not {v} the {t}",
    "nobody {p} the {t}",
)
_VERB_CLAUSES = ("I {p} the {t}", "we {p} the {t}", "everybody {p} the {t}", "I really {p} the {t}")

_AGREEING = (
    "{x} and {y}.",
    "{x}, and {y}.",
    "{x}. Also, {y}.",
    "{x} because {y}.",
    "{x}. {y}.",
    "In the end {x}, and {y}.",
)
_AGREEING_HELD_OUT = ("All in all, {x} and {y}.", "{x}, and in the end {y} because {y}.")
# _CONTRASTS: y has the review's sentiment, x the other one.
_CONTRASTS = (
    "{x}, but {y}.",
    "{x}. But {y}.",
    "although {x}, {y}.",
    "{y}, although {x}.",
    "even though {x}, {y}.",
    "{y} even though {x}.",
    "{x}. Still, {y}.",
    "{x}. In the end {y}.",
)
_CONTRASTS_HELD_OUT = (
    "in the end {y}, although {x}.",
    "{x}. Still, in the end {y}.",
    "all in all, {y}, even though {x}.",
    "I know that {x}, but {y}.",
)
# _HEARSAY: the opinion of others, or the expectation, has the other sentiment.
_HEARSAY = (
    "they told me the {t} was {o}, but it was {a}.",
    "I expected the {t} to be {o}. It was {a}.",
    "my friend said that {x}. I do not agree.",
    "my friend said that {y}. I agree.",
    "they say that {x}. They are wrong.",
    "they say that {y}. They are right.",
)
_HEARSAY_HELD_OUT = (
    "my friend told me that {x}. They are wrong.",
    "they say that {x}, but I do not agree.",
    "they told me that {y}, and I agree.",
)
_OPENERS = ("to be honest, {}", "well, {}", "honestly, {}", "today {}")

Shape = Callable[["Writer", int], str]


class Writer:
    """Builds clauses and reviews of a sentiment."""

    def __init__(self, rng: Random, words: Words, split: Split) -> None:
        self._rng = rng
        self._words = words
        self._held_out = split == "held_out"

    def plain(self, label: int) -> str:
        """Return a clause without negation."""
        rng = self._rng
        if rng.random() < 0.3:
            past, _ = rng.choice(self._words.verbs[label])
            return rng.choice(_VERB_CLAUSES).format(p=past, t=self._thing())
        being, degree = rng.choice(_VERBS_OF_BEING), rng.choice(_DEGREES)
        return f"the {self._thing()} {being} {degree}{self._adjective(label)}"

    def clause(self, label: int) -> str:
        """Return a clause, often one that denies the opposite."""
        rng = self._rng
        if rng.random() < 0.55:
            return self.plain(label)
        if rng.random() < 0.3:
            past, base = rng.choice(self._words.verbs[1 - label])
            return rng.choice(_DENIED_VERBS).format(v=base, p=past, t=self._thing())
        return rng.choice(_DENIALS).format(a=self._adjective(1 - label), t=self._thing())

    def one(self, label: int) -> str:
        """Return one clause."""
        return f"{self.clause(label)}."

    def agreeing(self, label: int) -> str:
        """Return two clauses of the same sentiment."""
        return self._fill(label, label, _AGREEING, _AGREEING_HELD_OUT)

    def contrast(self, label: int) -> str:
        """Return two clauses of which the main one has the sentiment."""
        return self._fill(1 - label, label, _CONTRASTS, _CONTRASTS_HELD_OUT)

    def hearsay(self, label: int) -> str:
        """Return an opinion of others or an expectation, and the contrary truth."""
        return self._fill(1 - label, label, _HEARSAY, _HEARSAY_HELD_OUT)

    def _fill(self, x: int, y: int, templates: tuple[str, ...], held_out: tuple[str, ...]) -> str:
        rng = self._rng
        chosen = rng.choice(held_out if self._held_out and rng.random() < 0.5 else templates)
        return chosen.format(
            x=self.clause(x),
            y=self.clause(y),
            t=self._thing(),
            o=self._adjective(x),
            a=self._adjective(y),
        )

    def _thing(self) -> str:
        return self._rng.choice(self._words.things)

    def _adjective(self, label: int) -> str:
        return self._rng.choice(self._words.adjectives[label])


_SHAPES: tuple[tuple[Shape, float], ...] = (
    (Writer.one, 0.25),
    (Writer.agreeing, 0.2),
    (Writer.contrast, 0.35),
    (Writer.hearsay, 0.2),
)


def review(rng: Random, split: Split, words: Words = TRAIN_WORDS) -> Review:
    """Return a review of either sentiment; ``words`` are those of training.

    Those held out are about things that no review of training is about, use adjectives that occur
    there in single clauses only, and half of their frames are not used there.
    """
    label = rng.randrange(2)
    if split == "train" and rng.random() < 0.12:
        text = f"{Writer(rng, _EVERY_WORD, split).plain(label)}."
    else:
        words = HELD_OUT_WORDS if split == "held_out" else words
        shapes, weights = zip(*_SHAPES, strict=True)
        text = rng.choices(shapes, weights)[0](Writer(rng, words, split), label)
    if rng.random() < 0.15:
        text = rng.choice(_OPENERS).format(text)
    return Review(sentence_case(text), label)


def single_clause(rng: Random) -> Review:
    """Return a review for training of one clause, which may deny something, with any adjective."""
    label = rng.randrange(2)
    words = replace(_EVERY_WORD, things=_MANY_THINGS)
    return Review(sentence_case(Writer(rng, words, "train").one(label)), label)


def sentence_case(text: str) -> str:
    """Return the text with a capital letter at the beginning of every sentence."""
    return ". ".join(part[:1].upper() + part[1:] for part in text.split(". "))
