"""From the labels of tokens to those of words and of groups of words.

The strategies are those of transformers' TokenClassificationPipeline; labels may have the prefixes
``B-`` and ``I-`` (Ramshaw and Marcus, 1995, https://arxiv.org/abs/cmp-lg/9505040).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_parallm.types.pooling import TokenSpan

Join = Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class LabelledTokens:
    """The tokens of a text with the model's scores.

    Attributes:
        spans: the tokens without special ones.
        places: their indices in the input.
        scores: float32 ``[tokens, labels]``.
        labels: the names of the labels.
    """

    spans: Sequence[TokenSpan]
    places: Sequence[int]
    scores: np.ndarray
    labels: Sequence[str]


def entities(tokens: LabelledTokens, strategy: str, join: Join) -> list[dict[str, Any]]:
    """Return the entities of a text.

    Args:
        tokens: the tokens of the text.
        strategy: "none": a label for each token. "simple": neighbours of the same label are one.
            "first", "average", "max": the same, but a word has the label of its first token, of
            the mean of its tokens' scores, or of the token with the highest score.
        join: returns the text of tokens.
    """
    if strategy in ("none", "simple"):
        labelled = list(_of_tokens(tokens))
    else:
        labelled = [_of_word(tokens, word, strategy, join) for word in _words(tokens.spans)]
    return labelled if strategy == "none" else [_merged(group, join) for group in _groups(labelled)]


def _of_tokens(tokens: LabelledTokens) -> Iterator[dict[str, Any]]:
    for span, place, row in zip(tokens.spans, tokens.places, tokens.scores, strict=True):
        yield _labelled(tokens, row, index=place, word=span.token, start=span.start, end=span.end)


def _words(spans: Sequence[TokenSpan]) -> list[list[int]]:
    """Return the indices of the tokens of each word."""
    words: list[list[int]] = []
    for number, span in enumerate(spans):
        if words and span.continues:
            words[-1].append(number)
        else:
            words.append([number])
    return words


def _of_word(
    tokens: LabelledTokens, word: Sequence[int], strategy: str, join: Join
) -> dict[str, Any]:
    rows = tokens.scores[list(word)]
    if strategy == "first":
        row = rows[0]
    elif strategy == "max":
        row = rows[int(rows.max(axis=1).argmax())]
    else:
        row = rows.mean(axis=0)
    spans = [tokens.spans[number] for number in word]
    text = join([span.token for span in spans])
    return _labelled(tokens, row, word=text, start=spans[0].start, end=spans[-1].end)


def _labelled(tokens: LabelledTokens, scores: np.ndarray, **place: Any) -> dict[str, Any]:
    """Return the likeliest label with its score, and the place that has it."""
    best = int(scores.argmax())
    return {"entity": tokens.labels[best], "score": float(scores[best]), **place}


def _groups(labelled: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return groups of neighbours with the same label; the prefix ``B-`` begins a new group."""
    groups: list[list[dict[str, Any]]] = []
    for each in labelled:
        label = each["entity"]
        begins = label.startswith("B-")
        if groups and not begins and _bare(label) == _bare(groups[-1][-1]["entity"]):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _bare(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _merged(group: Sequence[dict[str, Any]], join: Join) -> dict[str, Any]:
    return {
        # As in transformers, any prefix ends at the first dash.
        "entity_group": group[0]["entity"].split("-", 1)[-1],
        "score": sum(each["score"] for each in group) / len(group),
        "word": join([each["word"] for each in group]),
        "start": group[0]["start"],
        "end": group[-1]["end"],
    }
