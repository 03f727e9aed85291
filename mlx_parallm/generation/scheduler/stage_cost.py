"""The cost of computing inputs, learned from ended steps. Pure arithmetic: times are arguments."""

from __future__ import annotations

from mlx_parallm.numerics.fits import OnlineFit

# GROWTH: a step may have this many times the tokens of recent ones; predictions beyond that are not
# trusted.
GROWTH = 2.0
# RECENT_MEMORY: each step with fewer tokens lowers the recent number to this share of it.
RECENT_MEMORY = 0.75


class StageCost:
    """Predicts the seconds that computing inputs adds to a step, by their cost in tokens.

    A step that begins to compute an input also moves its arrays to the device.
    """

    def __init__(self) -> None:
        self._fit = OnlineFit(3)
        self._recent = 0.0

    def observe(self, tokens: float, begun: float, seconds: float, rows_s: float) -> None:
        """Learn from a step that took ``seconds``.

        Args:
            tokens: the cost of its stages.
            begun: the cost of the inputs that it began, all their stages.
            seconds: those of the whole step.
            rows_s: how many of them its rows take, by prediction.
        """
        self._fit.learn((tokens, begun, 1.0), seconds, rows_s)
        self._recent = max(tokens, RECENT_MEMORY * self._recent)

    def predict(self, tokens: float, begun: float) -> float:
        """Return the seconds of a step's stages; 0 before the first sample. See ``observe``."""
        return self._fit.predict((tokens, begun, 1.0)) if tokens else 0.0

    def tokens_within(self, seconds: float, begun: float) -> float:
        """Return for how many tokens a step may compute stages that take ``seconds``.

        0 before the first sample. ``begun`` is the cost of an input that it begins.
        """
        per_token, per_begun, fixed = self._fit.coefficients
        most = GROWTH * self._recent
        rest = max(0.0, seconds - fixed - per_begun * begun)
        return min(rest / per_token, most) if per_token > 0 else most if rest else 0.0
