"""From a request body to sampling parameters."""

from __future__ import annotations

from typing import Any

from mlx_parallm.api.turns.fields import SamplingFields
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list
from mlx_parallm.types.request import ALL_TOKENS, SamplingParams

# MAX_STOP_CHARS: of all stop strings; the engine's thread reads each when the request comes.
MAX_STOP_CHARS = 65_536
# PARAMETERS that bodies have by the same names. Their ``structured_outputs`` become a grammar.
PARAMETERS = frozenset(SamplingParams.__dataclass_fields__) - {"structured_outputs"}


def sampling_params(body: SamplingFields, *, max_logprobs: int, **changes: Any) -> SamplingParams:
    """Return the engine's parameters of a body, whose fields are taken by their names.

    Args:
        body: as it came.
        max_logprobs: most log-probabilities per token; -1 is no limit.
        changes: parameters that the body has in another form, or not at all.

    Raises:
        InvalidRequestError: a value is out of range, or more log-probabilities are asked for than
            the server allows.
    """
    names = PARAMETERS & type(body).model_fields.keys()
    values = {name: _immutable(getattr(body, name)) for name in names}
    values |= {"logit_bias": body.biases(), "stop": body.stops()} | changes
    if sum(map(len, values["stop"])) > MAX_STOP_CHARS:
        raise InvalidRequestError(
            f"Stop strings have at most {MAX_STOP_CHARS} characters together.", param="stop"
        )
    for name in ("logprobs", "prompt_logprobs"):
        count = values.get(name)
        if count is None or max_logprobs == ALL_TOKENS:
            continue
        if count > max_logprobs or count == ALL_TOKENS:
            name = "top_logprobs" if name == "logprobs" and hasattr(body, "top_logprobs") else name
            raise InvalidRequestError(f"{name} is at most {max_logprobs} here.", param=name)
    return SamplingParams(**values)


def _immutable(value: Any) -> Any:
    return tuple(value) if is_list(value) else value
