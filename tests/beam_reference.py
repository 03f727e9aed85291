"""Beam search as transformers writes it: arrays of fixed size, in which -1e9 stands for nothing.

It is written after ``_beam_search`` of transformers 5.23, for one prompt, and shares no code with
the package: tests compare both, and ``scripts/golden_beams.py`` ties it to transformers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

NOTHING = -1e9

#: Returns the log-probabilities of the next token, ``[vocabulary]``, after some tokens.
NextLogprobs = Callable[[tuple[int, ...]], np.ndarray]


def reference_beams(
    logprobs_of: NextLogprobs,
    *,
    width: int,
    end_ids: Collection[int],
    max_tokens: int,
    length_penalty: float,
    early_stopping: bool | str,
    num_counted: int = 0,
) -> list[tuple[tuple[int, ...], float]]:
    """Return the finished hypotheses, best first: their tokens and scores.

    ``num_counted``: tokens before the first that lengths count.
    """
    kept = max(2, 1 + len(end_ids)) * width
    running: list[tuple[int, ...]] = [()] * width
    running_scores = np.array([0.0] + [NOTHING] * (width - 1))
    finished: list[tuple[int, ...]] = [()] * width
    scores = np.full(width, NOTHING)
    is_finished = np.zeros(width, bool)
    length = 0
    while True:
        rows = np.stack([logprobs_of(tokens) for tokens in running])
        totals = (rows + running_scores[:, None]).reshape(-1)
        order = np.argsort(-totals, kind="stable")[:kept]
        parents, tokens = order // rows.shape[1], order % rows.shape[1]
        top = totals[order]
        texts = [(*running[p], int(t)) for p, t in zip(parents, tokens, strict=True)]
        length += 1
        ends = np.array([text[-1] in end_ids or length >= max_tokens for text in texts])
        going = top + ends * NOTHING
        best = np.argsort(-going, kind="stable")[:width]
        running, running_scores = [texts[i] for i in best], going[best]

        new = top / (length + num_counted) ** length_penalty
        new = new + (is_finished.all() and early_stopping is True) * NOTHING
        counts = ends & (np.arange(len(order)) < width)
        new = new + ~counts * NOTHING
        merged = np.concatenate([scores, new])
        place = np.argsort(-merged, kind="stable")[:width]
        everything = finished + texts
        finished, scores = [everything[i] for i in place], merged[place]
        is_finished = np.concatenate([is_finished, counts])[place]

        longest = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        possible = running_scores[0] / (longest + num_counted) ** length_penalty
        can_improve = bool((possible > np.where(is_finished, scores.min(), NOTHING)).any())
        is_open = not (is_finished.all() and early_stopping is True)
        if not (can_improve and is_open and not ends.all()):
            break
    results = zip(finished, scores.tolist(), is_finished.tolist(), strict=True)
    return [
        (text, score)
        for text, score, is_real in results
        # Beams that stand for nothing may end too.
        if is_real and score * (len(text) + num_counted) ** length_penalty > NOTHING / 2
    ]
