"""Facts about people, as statements and questions, on which the embedder is trained.

Two texts belong together if they are about the same fact: a statement and another wording of it,
or a question and the statement that answers it. Facts share names, places and things, and some
differ only in who does what to whom.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo.example import HELD_OUT_ONE_IN, Split
from demo.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    FOODS,
    JOBS,
    LANGUAGES,
    MONTHS,
    NAMES,
    OBJECTS,
    WEEKDAYS,
)

Values = dict[str, object]
_ARTICLE = re.compile(r"\ba(?= [AEIOaeio])")


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact.

    Attributes:
        make: draws its values.
        statements: wordings; all say everything.
        questions: wordings; each leaves out what it asks for.
        swapped: two values that make another fact when they change places.
    """

    make: Callable[[Random], Values]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    swapped: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """A relation by name, and its values."""

    relation: str
    values: tuple[tuple[str, object], ...]

    @property
    def split(self) -> Split:
        """The fact's split, by its hash without the wording; one in twenty is held out."""
        digest = zlib.crc32(f"{self.relation}|{self.values}".encode())
        return "held_out" if digest % HELD_OUT_ONE_IN == 0 else "train"


def _people(rng: Random, *others: tuple[str, tuple[str, ...]], **more: object) -> Values:
    first, second = rng.sample(NAMES, 2)
    return {"a": first, "b": second} | {name: rng.choice(words) for name, words in others} | more


def _journey(rng: Random) -> Values:
    start, end = rng.sample(CITIES, 2)
    return {"a": rng.choice(NAMES), "s": start, "e": end, "d": rng.choice(WEEKDAYS)}


def _tastes(rng: Random) -> Values:
    liked, disliked = rng.sample(FOODS, 2)
    return {"a": rng.choice(NAMES), "l": liked, "d": disliked}


RELATIONS: dict[str, Relation] = {
    "gift": Relation(
        lambda r: _people(r, ("c", COLOURS), ("o", OBJECTS)),
        ("{a} gave {b} a {c} {o}.", "{b} got a {c} {o} from {a}.",
         "{a} gave a {c} {o} to {b}.", "The {c} {o} was a gift from {a} to {b}.",
         "{b} has a {c} {o} that came from {a}."),
        ("Who gave {b} the {c} {o}?", "Who got the {c} {o} from {a}?",
         "What did {b} get from {a}?", "What did {a} give to {b}?"),
        ("a", "b"),
    ),
    "work": Relation(
        lambda r: {"a": r.choice(NAMES), "j": r.choice(JOBS), "c": r.choice(CITIES)},
        ("{a} works as a {j} in {c}.", "In {c}, {a} is a {j}.", "{a} is a {j} and works in {c}.",
         "{a} has a job in {c} as a {j}.", "The {j} {a} works in {c}."),
        ("What is the job of {a} in {c}?", "Where does the {j} {a} work?",
         "In which city does {a} work as a {j}?", "What does {a} do in {c}?"),
    ),
    "journey": Relation(
        _journey,
        ("{a} travels from {s} to {e} on {d}.", "On {d} {a} leaves {s} for {e}.",
         "{a} will be in {e} on {d}, coming from {s}.",
         "The trip of {a} on {d} is from {s} to {e}.",
         "From {s} to {e}: that is where {a} travels on {d}."),
        ("When does {a} travel from {s} to {e}?", "Where does {a} go from {s} on {d}?",
         "On which day does {a} leave {s} for {e}?", "From where does {a} come to {e} on {d}?"),
        ("s", "e"),
    ),
    "taste": Relation(
        _tastes,
        ("{a} likes {l} but not {d}.", "{a} does not eat {d}, but loves {l}.",
         "{a} enjoys {l} and dislikes {d}.", "{l} is what {a} likes; {d} is what {a} dislikes.",
         "{a} would never take {d} but is happy with {l}."),
        ("Which food does {a} like more than {d}?", "{a} likes {l}; what does {a} dislike?",
         "Does {a} like {l} or {d}?"),
        ("l", "d"),
    ),
    "pet": Relation(
        lambda r: _people(r, ("k", ANIMALS), ("c", COLOURS)),
        ("{a} has a {c} {k} called {b}.", "{b} is the {c} {k} of {a}.",
         "The name of the {c} {k} of {a} is {b}.", "{a} keeps {b}, a {c} {k}.",
         "{b}, a {c} {k}, lives with {a}."),
        ("What is the {c} {k} of {a} called?", "What colour is {b}, the {k} of {a}?",
         "Whose {c} {k} is called {b}?", "Which animal is {b}, the {c} one of {a}?"),
        ("a", "b"),
    ),
    "age": Relation(
        lambda r: _people(r, ("c", CITIES)),
        ("{a} is older than {b} and lives in {c}.", "{b} is younger than {a}, who lives in {c}.",
         "In {c} lives {a}, who is older than {b}.", "Compared with {b}, {a} from {c} is older."),
        ("Who from {c} is older than {b}?", "Is {a} from {c} older or younger than {b}?",
         "Who is younger than {a} from {c}?"),
        ("a", "b"),
    ),
    "lesson": Relation(
        lambda r: _people(r, ("l", LANGUAGES), ("d", WEEKDAYS)),
        ("{a} teaches {b} {l} on {d}.", "On {d} {b} learns {l} from {a}.",
         "{b} has a {l} lesson with the teacher {a} on {d}.",
         "{a} is the teacher of {b} for {l}, on {d}."),
        ("Who teaches {b} {l} on {d}?", "Who learns {l} from {a} on {d}?",
         "What does {b} learn from {a} on {d}?", "When does {a} teach {b} {l}?"),
        ("a", "b"),
    ),
    "price": Relation(
        lambda r: {"a": r.choice(NAMES), "o": r.choice(OBJECTS), "n": r.randint(2, 99),
                   "c": r.choice(CITIES)},
        ("{a} bought a {o} for {n} euros in {c}.", "In {c} {a} paid {n} euros for a {o}.",
         "The {o} that {a} bought in {c} cost {n} euros.",
         "{n} euros is what {a} paid in {c} for a {o}."),
        ("How much did {a} pay for the {o} in {c}?", "What did {a} buy for {n} euros in {c}?",
         "Where did {a} buy a {o} for {n} euros?", "Who bought a {o} for {n} euros in {c}?"),
    ),
    "birthday": Relation(
        lambda r: {"a": r.choice(NAMES), "m": r.choice(MONTHS), "c": r.choice(CITIES),
                   "n": r.randint(1, 28)},
        ("{a} was born in {c} on {m} {n}.", "The birthday of {a}, who was born in {c}, is {m} {n}.",
         "On {m} {n} in {c}, {a} was born.", "{c} is where {a} was born, on {m} {n}."),
        ("When was {a} from {c} born?", "Where was {a} born on {m} {n}?",
         "On which day is the birthday of {a} from {c}?", "Who was born in {c} on {m} {n}?"),
    ),
}  # fmt: skip


def fact(rng: Random, split: Split) -> Fact:
    """Return a fact of a random relation."""
    while True:
        relation = rng.choice(tuple(RELATIONS))
        drawn = Fact(relation, tuple(RELATIONS[relation].make(rng).items()))
        if drawn.split == split:
            return drawn


def near(rng: Random, original: Fact) -> Fact:
    """Return a similar fact: two values exchanged, or one value changed."""
    relation, values = RELATIONS[original.relation], dict(original.values)
    if relation.swapped and rng.random() < 0.6:
        first, second = relation.swapped
        values[first], values[second] = values[second], values[first]
        return Fact(original.relation, tuple(values.items()))
    while True:
        name = rng.choice(tuple(values))
        changed = values | {name: relation.make(rng)[name]}
        if len(set(changed.values())) == len(values) and changed != values:
            return Fact(original.relation, tuple(changed.items()))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts about one fact: a question or a statement, and a statement in other words.

    Attributes:
        fact: the fact of both texts.
        template: the template of the first text.
        query: the first text.
        statement: the second one.
    """

    fact: Fact
    template: str
    query: str
    statement: str

    def fits(self, other: Fact) -> bool:
        """True if the query also fits another fact."""
        return other.relation == self.fact.relation and _worded(self.template, other) == self.query


def pair(rng: Random, fact: Fact) -> Pair:
    """Return two texts about a fact; the first is a question half of the time."""
    relation = RELATIONS[fact.relation]
    template, other = rng.sample(relation.statements, 2)
    if rng.random() < 0.5:
        template = rng.choice(relation.questions)
    return Pair(fact, template, _worded(template, fact), _worded(other, fact))


def pairs(rng: Random, count: int, split: Split) -> list[Pair]:
    """Return ``count`` pairs, half of them about facts similar to those of the other half.

    No query is about the fact of another pair.
    """
    accepted: list[Pair] = []
    while len(accepted) < count:
        is_near = len(accepted) % 2 == 1
        candidate = near(rng, accepted[-1].fact) if is_near else fact(rng, split)
        new_pair = pair(rng, candidate)
        # A similar fact may be held out, and then it must not be trained on.
        if split == "train" and candidate.split != split:
            accepted.pop()
        elif not any(new_pair.fits(old.fact) or old.fits(candidate) for old in accepted):
            accepted.append(new_pair)
    return accepted


def _worded(template: str, fact: Fact) -> str:
    text = _ARTICLE.sub("an", template.format(**dict(fact.values)))
    return text[:1].upper() + text[1:]
