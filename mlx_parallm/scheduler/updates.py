"""What a step changed for one sample."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_parallm.batch import SampledToken
from mlx_parallm.outputs import FinishReason, PromptEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceUpdate:
    """One sample's share of a step's result.

    Attributes:
        request_id: the request.
        index: which of its ``n`` samples.
        token: the token chosen in this step, if any.
        finish_reason: set when the sample ended.
        stop_reason: the stop token id that ended it; None for the model's own end-of-sequence.
        prompt: set once per request, when its prompt has been computed.
        error: why the sample failed.
        num_preemptions: how often the sample has been preempted so far.
    """

    request_id: str
    index: int
    token: SampledToken | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    prompt: PromptEvent | None = None
    error: str | None = None
    num_preemptions: int = 0
