"""A training session of reviews, and requests of tests for it and for others."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import httpx2

SESSIONS = "/v1/mezo/sessions"
MODEL = "demo:mlm"
#: What stands for the mask, by the labels of rows.
WORDS = {"good": "cat", "bad": "dog"}
OBJECTIVE = {"kind": "label_words", "template": "{text} It was [MASK].", "label_words": WORDS}
GOOD = ("a joyful film", "the cast shines", "a warm and clever story", "I loved every minute")
BAD = ("a dull film", "it drags on", "a cold and empty story", "I hated every minute")
ROWS = [
    {"text": text, "label": label}
    for pair in zip(GOOD, BAD, strict=True)
    for text, label in zip(pair, WORDS, strict=True)
]
SESSION: dict[str, Any] = {
    "model": MODEL,
    "trainable": {"layers": "top:1", "targets": ["value", "attention.output.dense"], "rank": 4},
    "estimator": {"learning_rate": 0.03},
    "objective": OBJECTIVE,
    "data": ROWS,
    "batch_size": 4,
}


def asked(client: httpx2.Client, path: str, **body: Any) -> dict[str, Any]:
    """Return the answer to a body; check that it is not refused."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def begun(client: httpx2.Client, **body: Any) -> str:
    """Begin a session; return its path."""
    return f"{SESSIONS}/{asked(client, SESSIONS, **body)['id']}"


def begin(client: httpx2.Client, **changes: Any) -> str:
    """Begin a session; return its path."""
    return begun(client, **(SESSION | changes))


def events(client: httpx2.Client, path: str, after: int = 0) -> list[dict[str, Any]]:
    """Return the steps of a stream that ends by itself."""
    answer = client.get(f"{path}/events", params={"after": after})
    *lines, last = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def served_loss(client: httpx2.Client, model: str, rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean cross-entropy in nats of a served model's label words for rows."""
    texts = [f"{row['text']} It was [MASK]." for row in rows]
    answer = asked(client, "/v1/mlm", model=model, texts=texts, label_words=WORDS)
    scores = [
        {word["label"]: word["score"] for word in text["predictions"][0]["words"]}
        for text in answer["data"]
    ]
    return -fmean(
        math.log(by_label[row["label"]]) for by_label, row in zip(scores, rows, strict=True)
    )
