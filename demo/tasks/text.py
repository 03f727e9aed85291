"""Copying, looking up in the given context, and extracting fields to JSON."""

from __future__ import annotations

import json
from random import Random

from demo.example import Example, user
from demo.phrasing import phrase
from demo.words import (
    COLOURS,
    FOODS,
    FUNCTION_WORDS,
    JOBS,
    MONTHS,
    OBJECTS,
    WEEKDAYS,
    any_city,
    any_name,
    any_word,
    identifier,
    odd_word,
    sentence,
)

_COPY = (
    "Repeat after me: {t}",
    "Repeat this: {t}",
    "Copy this text exactly: {t}",
    "Say exactly this: {t}",
    "Repeat the following text:\n{t}",
    "Echo: {t}",
    "Write this again, word for word: {t}",
    'Say "{t}".',
    'Say "{t}"',
    "Say '{t}'",
    "Say: {t}",
    "Repeat: {t}",
    "Copy: {t}",
    "Output exactly: {t}",
    "Reply with exactly: {t}",
    "Respond with: {t}",
    "Print: {t}",
    'Repeat "{t}"',
)
_COPY_WORDS = (
    "Say {t}",
    "Say {t}.",
    "Reply with the word {t}.",
    "Answer with the word {t}.",
    "Reply with {t}.",
    "Reply only with {t}.",
    "Just say {t}.",
    "Say the word {t}.",
    "Repeat {t}",
)
_COPY_TIMES = (
    "Repeat the word {t} {n} times.",
    "Say {t} {n} times.",
    "Write {t} {n} times.",
    'Say "{t}" {n} times.',
)
_UNUSUAL = "äöüßéèñçøåαβγδλπσωбгджялπ中文日本語한국어✓→€£°½🙂🚀🎉"

_KEY_ASK = (
    "What is the value of {k}?",
    "What value does {k} have?",
    "Look up {k}.",
    "Tell me the value for {k}.",
    "What is {k}?",
    "Which value belongs to {k}?",
)
_FACTS = {
    "lives in": ("Where does {n} live?", "In which city does {n} live?"),
    "works as a": ("What does {n} work as?", "What is {n}'s job?"),
    "has a": ("What does {n} have?",),
    "likes the colour": ("Which colour does {n} like?", "What is {n}'s favourite colour?"),
    "was born in": ("When was {n} born?", "In which month was {n} born?"),
    "is aged": ("How old is {n}?", "What is {n}'s age?"),
}
_EXTRACT = (
    "Extract {f} as JSON: {t}",
    "Extract {f} from this text as JSON: {t}",
    "{t}\n\nReturn {f} as JSON.",
    "Give me a JSON object with {f}.\n\n{t}",
    'Text: "{t}"\nReturn a JSON object with the fields {f}.',
    "Extract the {f} as JSON: {t}",
    "Extract the {f} from: {t}",
    "Give me JSON with {f}: {t}",
    "Return JSON with {f} for: {t}",
    "{t} Answer in JSON with {f}.",
    "Extract {f} as JSON from: {t}",
)


def copy(rng: Random) -> Example:
    """Return a sentence, words, or a string of characters to be repeated exactly."""
    if rng.random() < 0.2:
        return _copy_words(rng)
    text = _copy_text(rng)
    question = phrase(rng, _COPY, t=text)
    return Example(task="copy", key=text, messages=(user(question),), answer=text)


def _copy_words(rng: Random) -> Example:
    words = [rng.choice(FUNCTION_WORDS) if rng.random() < 0.4 else any_word(rng)
             for _ in range(rng.choice((1, 1, 2, 3, 4, 6)))]  # fmt: skip
    text = " ".join(words)
    text = rng.choice((text, text, text.capitalize(), text.upper() if len(text) < 12 else text))
    if rng.random() < 0.3:
        count = rng.randint(2, 12)
        question, answer = (
            phrase(rng, _COPY_TIMES, t=words[0], n=count),
            " ".join(words[:1] * count),
        )
    else:
        question, answer = phrase(rng, _COPY_WORDS, t=text), text
    return Example(task="copy", key=answer, messages=(user(question),), answer=answer)


def _copy_text(rng: Random) -> str:
    style = rng.random()
    if style < 0.3:
        return " ".join(sentence(rng) for _ in range(rng.choice((1, 1, 2, 3))))
    if style < 0.4:
        return " ".join(any_word(rng) for _ in range(rng.randint(1, 12)))
    if style < 0.5:
        words = [rng.choice(FUNCTION_WORDS) if rng.random() < 0.4 else odd_word(rng)
                 for _ in range(rng.randint(1, 15))]  # fmt: skip
        return " ".join(words).capitalize() + rng.choice((".", "!", "?", ""))
    if style < 0.62:
        return " ".join(identifier(rng) for _ in range(rng.randint(1, 4)))
    if style < 0.76:
        return " ".join(
            str(rng.randrange(10 ** rng.randint(1, 6))) for _ in range(rng.randint(1, 8))
        )
    if style < 0.88:
        return " ".join(odd_word(rng) for _ in range(rng.randint(1, 8)))
    characters = _UNUSUAL if style < 0.94 else "".join(map(chr, range(33, 127)))
    return "".join(rng.choice(characters) for _ in range(rng.randint(1, 16)))


def _value(rng: Random) -> str:
    style = rng.random()
    if style < 0.4:
        return str(rng.randrange(10 ** rng.randint(1, 5)))
    if style < 0.6:
        return any_word(rng)
    return rng.choice((identifier, any_city, any_name))(rng)


def lookup_keys(rng: Random) -> Example:
    """Return the value of one key in a list of keys and values, from two to some 150 entries."""
    size = rng.random()
    count = rng.randint(2, 12) if size < 0.85 else rng.randint(15, 60)
    count = rng.randint(60, 150) if size > 0.97 else count
    kind = rng.choice((any_word, any_name, identifier, any_word))
    keys = list(dict.fromkeys(kind(rng) for _ in range(count)))
    values = [_value(rng) for _ in keys]
    separator = rng.choice((": ", " = ", " -> ", ", ", "="))
    if rng.random() < 0.2:
        listed = json.dumps(dict(zip(keys, values, strict=True)))
    else:
        pairs = [f"{key}{separator}{value}" for key, value in zip(keys, values, strict=True)]
        joiner = "\n" if separator == ", " or rng.random() < 0.7 else "; "
        listed = joiner.join(pairs)
    place = rng.randrange(len(keys))
    return _lookup_example(rng, "lookup_keys", listed, keys[place], values[place])


def _lookup_example(rng: Random, task: str, listed: str, key: str, value: str) -> Example:
    ask = phrase(rng, _KEY_ASK, k=key)
    question = f"{listed}\n\n{ask}" if rng.random() < 0.6 else f"{ask}\n\n{listed}"
    return Example(task=task, key=f"{key}|{listed}", messages=(user(question),), answer=value)


def lookup_table(rng: Random) -> Example:
    """Return a question about one cell of a small Markdown or CSV table."""
    columns = rng.sample(
        ("age", "city", "job", "colour", "code", "price", "day"), rng.randint(2, 4)
    )
    names = list(dict.fromkeys(any_name(rng) for _ in range(rng.randint(2, 7))))
    rows = [[name, *(_cell(rng, column) for column in columns)] for name in names]
    header = ["name", *columns]
    if rng.random() < 0.5:
        lines = [header, ["---"] * len(header), *rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    else:
        table = "\n".join(",".join(line) for line in [header, *rows])
    row, column = rng.choice(rows), rng.randrange(len(columns))
    asks = ("What is the {c} of {n}?", "What is {n}'s {c}?", "Which {c} does {n} have?",
            "Find the {c} for {n}.")  # fmt: skip
    ask = phrase(rng, asks, c=columns[column], n=row[0])
    question = f"{table}\n\n{ask}" if rng.random() < 0.6 else f"{ask}\n\n{table}"
    answer = row[column + 1]
    return Example(
        task="lookup_table", key=f"{row[0]} {table}", messages=(user(question),), answer=answer
    )


def _cell(rng: Random, column: str) -> str:
    if column == "age":
        return str(rng.randint(5, 95))
    if column == "price":
        return f"{rng.randint(1, 200)}.{rng.randint(0, 99):02d}"
    makers = {"city": any_city, "code": identifier}
    choices = {"job": JOBS, "colour": COLOURS, "day": WEEKDAYS}
    return makers[column](rng) if column in makers else rng.choice(choices[column])


def lookup_sentences(rng: Random) -> Example:
    """Return a fact about one of several people or things, among other sentences."""
    if rng.random() < 0.25:
        return _lookup_things(rng)
    names = list(dict.fromkeys(any_name(rng) for _ in range(rng.randint(2, 6))))
    relations = rng.sample(tuple(_FACTS), rng.randint(1, 3))
    facts = [(name, relation, _fact(rng, relation)) for name in names for relation in relations]
    rng.shuffle(facts)
    lines = [f"{name} {relation} {value}." for name, relation, value in facts]
    for _ in range(rng.choice((0, 0, 1, 3))):
        lines.insert(rng.randrange(len(lines) + 1), sentence(rng))
    name, relation, value = rng.choice(facts)
    ask = phrase(rng, _FACTS[relation], n=name)
    text = " ".join(lines)
    question = f"{text}\n\n{ask}" if rng.random() < 0.7 else f"{ask} {text}"
    return Example(
        task="lookup_sentences",
        key=f"{name}|{relation}|{text}",
        messages=(user(question),),
        answer=f"{name} {relation} {value}.",
    )


def _lookup_things(rng: Random) -> Example:
    """Return a question about who has how many of what, or the colour of a thing."""
    if rng.random() < 0.5:
        names = list(dict.fromkeys(any_name(rng) for _ in range(rng.randint(1, 5))))
        thing = rng.choice(FOODS[:20] + OBJECTS[:40])
        facts = [(name, f"{name} has {rng.randint(2, 99)} {thing}s.") for name in names]
        asks = (f"How many {thing}s does {{n}} have?",)
    else:
        things = rng.sample(FOODS + OBJECTS, rng.randint(1, 5))
        facts = [(thing, f"The {thing} is {rng.choice(COLOURS)}.") for thing in things]
        asks = (
            "What colour is the {n}?",
            "What color is the {n}?",
            "Which colour does the {n} have?",
        )
    name, answer = rng.choice(facts)
    text = " ".join(fact for _, fact in facts)
    return Example(
        task="lookup_sentences",
        key=f"{name}|{text}",
        messages=(user(f"{text} {phrase(rng, asks, n=name)}"),),
        answer=answer,
    )


def _fact(rng: Random, relation: str) -> str:
    if relation == "lives in":
        return any_city(rng)
    if relation == "is aged":
        return str(rng.randint(5, 95))
    lists = {"works as a": JOBS, "has a": OBJECTS, "likes the colour": COLOURS}
    return rng.choice(lists.get(relation, MONTHS))


def _person(rng: Random) -> tuple[str, dict[str, object]]:
    fields = {"name": any_name(rng), "age": rng.randint(5, 95), "city": any_city(rng),
              "job": rng.choice(JOBS)}  # fmt: skip
    texts = (
        "{name} is {age} years old, lives in {city} and works as a {job}.",
        "My name is {name}, I am a {job} from {city} and I am {age}.",
        "{name}, {age}, is a {job} in {city}.",
        "{name} ({age}) moved to {city} to work as a {job}.",
    )
    return rng.choice(texts).format(**fields), fields


def _part_of_person(rng: Random) -> tuple[str, dict[str, object]]:
    name, age, city, job = any_name(rng), rng.randint(5, 95), any_city(rng), rng.choice(JOBS)
    texts: tuple[tuple[str, dict[str, object]], ...] = (
        (f"{name} lives in {city}.", {"name": name, "city": city}),
        (f"{name} is {age} years old.", {"name": name, "age": age}),
        (f"{name} is {age} and lives in {city}.", {"name": name, "age": age, "city": city}),
        (f"{name}, {age} years old, from {city}", {"name": name, "age": age, "city": city}),
        (f"{name} works as a {job}.", {"name": name, "job": job}),
        (f"{name} is a {job}.", {"name": name, "job": job}),
    )
    return rng.choice(texts)


def _record(rng: Random) -> tuple[str, dict[str, object]]:
    names = list(dict.fromkeys(any_word(rng).lower() for _ in range(rng.randint(2, 6))))
    fields: dict[str, object] = {
        name: rng.randrange(10 ** rng.randint(1, 4)) if rng.random() < 0.4 else any_word(rng)
        for name in names
    }
    joiner = rng.choice(("\n", ", ", "; "))
    return joiner.join(f"{name}: {value}" for name, value in fields.items()), fields


def _order(rng: Random) -> tuple[str, dict[str, object]]:
    fields = {"item": any_word(rng), "quantity": rng.randint(1, 99), "price": rng.randint(1, 500),
              "customer": any_name(rng)}  # fmt: skip
    texts = (
        "{customer} ordered {quantity} pieces of {item} for {price} euros.",
        "Order: {quantity} x {item}, {price} euros, for {customer}.",
        "Please send {quantity} {item} to {customer}; the price is {price} dollars.",
    )
    return rng.choice(texts).format(**fields), fields


def _event(rng: Random) -> tuple[str, dict[str, object]]:
    fields = {"title": any_word(rng) + rng.choice((" party", " meeting", " concert", " fair")),
              "day": rng.choice(WEEKDAYS), "place": any_city(rng),
              "guests": rng.randint(2, 300)}  # fmt: skip
    texts = (
        "The {title} is on {day} in {place} with {guests} guests.",
        "On {day} {guests} people come to {place} for the {title}.",
        "{place} hosts the {title} this {day}; {guests} guests are expected.",
    )
    return rng.choice(texts).format(**fields), fields


def extract_json(rng: Random) -> Example:
    """Return a problem that extracts fields of a sentence as a JSON object, in a given order."""
    text, fields = rng.choice((_person, _person, _part_of_person, _record, _order, _event))(rng)
    names = rng.sample(tuple(fields), rng.randint(1, min(4, len(fields))))
    if rng.random() < 0.3:
        names = list(fields)
    names_text = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    answer = json.dumps({name: fields[name] for name in names}, ensure_ascii=False)
    return Example(
        task="extract_json",
        key=f"{text} {sorted(names)}",
        messages=(user(phrase(rng, _EXTRACT, f=names_text, t=text)),),
        answer=answer,
        check="json",
    )
