"""Fixed texts of many kinds, to compare encoders with."""

from __future__ import annotations

import random

SUBJECTS: tuple[str, ...] = (
    "A dog",
    "The committee",
    "My neighbour's car",
    "Nobody",
    "Each of the three probes",
)
VERBS: tuple[str, ...] = (
    "sleeps",
    "has postponed the vote",
    "broke down",
    "knew the answer",
    "sends 12.5 kB/s",
)
PLACES: tuple[str, ...] = (
    "in the sun.",
    "until Tuesday, 3 May!",
    "near Zürich...",
    "- or so they say",
    "at 04:17?",
)
WHOLE: tuple[str, ...] = (
    "",
    " ",
    "a",
    "?!",
    "\n\n\t",
    "0",
    "3.14159 x 10^-7",
    "https://example.com/a/b?c=d&e=f#g",
    "def add(a, b):\n    return a + b\n",
    '{"key": [1, 2, null], "other": {"x": true}}',
    "SELECT name FROM users WHERE id = 7;",
    "UPPER CASE AND lower case And Title Case",
    "Der Fluß fließt träge durch die Ebene; niemand stört ihn.",
    "L'été dernier, nous avons mangé des crêpes à Nîmes.",
    "El niño comió piñas en la mañana.",
    "Привет, как дела?",
    "今日は天気がいいですね。",
    "天气很好，我们去公园。",  # noqa: RUF001 - this is how Chinese is written
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "안녕하세요, 반갑습니다.",
    "Ελλάδα και θάλασσα",
    "emoji: 🙂🚀🇨🇭 and 👩‍👩‍👧",
    "e\u0301 against \u00e9, \ufb01 against fi",
    "tabs\tand  double  spaces   here",
    "[CLS] [SEP] [MASK] <s> </s> <|endoftext|>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "zero\u200bwidth and soft\u00adhyphen",
    "control \x07 character",
)


def varied_texts(count: int = 200) -> list[str]:
    """Return texts of zero to a thousand words: several scripts, code, numbers, and sentences."""
    source = random.Random(6)
    texts = list(WHOLE)
    while len(texts) < count:
        # Every tenth text is longer than most models accept.
        most = 120 if len(texts) % 10 == 0 else 12
        sentences = [
            f"{source.choice(SUBJECTS)} {source.choice(VERBS)} {source.choice(PLACES)}"
            for _ in range(source.randint(1, most))
        ]
        texts.append(" ".join(sentences))
    return texts[:count]
