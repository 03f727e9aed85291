"""The settings of beam search."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mlx_parallm.types.errors import InvalidRequestError

MAX_BEAMS = 64
#: ``MAX_LENGTH_PENALTY`` bounds the exponent, so that no power of a length is infinite.
MAX_LENGTH_PENALTY = 10.0
NEVER = "never"
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Settings of beam search; names and meanings are those of transformers.

    The request's ``n`` is the number of results, ``num_return_sequences`` there.

    Attributes:
        width: number of beams, 1 to 64.
        length_penalty: the score of a finished hypothesis is the sum of its tokens'
            log-probabilities over its number of generated tokens, the end token included, to this
            power. Above 0 longer results score better; -10 to 10.
        early_stopping: True: the search ends with ``width`` finished hypotheses. False: it ends
            once the best beam, were it to end now, would score worse than all of these. "never": it
            ends once no continuation can score better.
        num_counted: tokens before the output that lengths count, such as a forced first token.
        renormalizes: True: log-probabilities are normalised again after bans, biases and penalties.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_counted: int = 0
    renormalizes: bool = False

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidRequestError: one is out of range.
        """
        if not 1 <= self.width <= MAX_BEAMS:
            raise InvalidRequestError(
                f"Beam search has 1 to {MAX_BEAMS} beams.", param="beam_width"
            )
        # This also refuses NaN.
        if not math.fabs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise InvalidRequestError(
                f"length_penalty must be between -{MAX_LENGTH_PENALTY:g} and "
                f"{MAX_LENGTH_PENALTY:g}.",
                param="length_penalty",
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != NEVER:
            raise InvalidRequestError(
                f'early_stopping must be true, false or "{NEVER}".', param="early_stopping"
            )
