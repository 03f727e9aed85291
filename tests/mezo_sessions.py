"""Requests of tests for training sessions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import httpx2

SESSIONS = "/v1/mezo/sessions"
#: What stands for the mask, by the labels of rows.
WORDS = {"good": "cat", "bad": "dog"}


def asked(client: httpx2.Client, path: str, **body: Any) -> dict[str, Any]:
    """Return the answer to a body; check that it is not refused."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def begun(client: httpx2.Client, **body: Any) -> str:
    """Begin a session; return its path."""
    return f"{SESSIONS}/{asked(client, SESSIONS, **body)['id']}"


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
