"""The cost of computing inputs, learned from ended steps. Pure arithmetic: times are arguments."""

from __future__ import annotations

from mlx_parallm.engine.fits import OnlineFit

# GROWTH: a step may have this many times the tokens of recent ones; predictions beyond that are not
# trusted.
GROWTH = 2.0
# RECENT_MEMORY: each step with fewer tokens lowers the recent number to this share of it.
RECENT_MEMORY = 0.75


class StageCost:
    """Predicts the seconds that computing inputs adds to a step, by their cost in tokens."""

    def __init__(self) -> None:
        self._fit = OnlineFit(2)
        self._recent = 0.0

    def observe(self, tokens: float, seconds: float, rows_s: float) -> None:
        """Learn from a step that took ``seconds``.

        Args:
            tokens: the cost of its stages.
            seconds: those of the whole step.
            rows_s: how many of them its rows take, by prediction.
        """
        self._fit.learn((tokens, 1.0), seconds, rows_s)
        self._recent = max(tokens, RECENT_MEMORY * self._recent)

    def predict(self, tokens: float) -> float:
        """Return the seconds of stages that cost ``tokens``; 0 before the first sample."""
        return self._fit.predict((tokens, 1.0)) if tokens else 0.0

    def tokens_within(self, seconds: float) -> float:
        """Return for how many tokens a step may compute stages that take ``seconds``.

        0 before the first sample.
        """
        per_token, fixed = self._fit.coefficients
        most = GROWTH * self._recent
        rest = max(0.0, seconds - fixed)
        return min(rest / per_token, most) if per_token > 0 else most if rest else 0.0
