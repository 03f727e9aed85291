"""The log-probability of labels, each of one token or several, by few prefills."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LabelTree:
    """The labels' tokens as a tree: labels that begin alike share what they begin with.

    Attributes:
        labels: the tokens of each.
        branches: what may follow each beginning of a label; the empty one comes first.
    """

    labels: tuple[Tokens, ...]
    branches: Mapping[Tokens, Tokens]

    @staticmethod
    def of(labels: Sequence[Tokens]) -> LabelTree:
        """Return the tree of these labels, none of which begins another."""
        branches: dict[Tokens, dict[int, None]] = {}
        for label in labels:
            for place, token in enumerate(label):
                branches.setdefault(label[:place], {})[token] = None
        return LabelTree(tuple(labels), {start: tuple(ids) for start, ids in branches.items()})

    def probabilities(self, logprobs: Mapping[tuple[Tokens, int], float]) -> list[float]:
        """Each label's share, from the log-probability of each token after its beginning."""
        totals = [
            sum(logprobs[label[:place], token] for place, token in enumerate(label))
            for label in self.labels
        ]
        best = max(totals)
        weights = [math.exp(total - best) for total in totals]
        whole = sum(weights)
        return [weight / whole for weight in weights]
