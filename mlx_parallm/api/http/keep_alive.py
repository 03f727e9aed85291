"""Fields of bodies for the time that a model stays in memory: Ollama's, and LM Studio's ``ttl``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema
from starlette.requests import Request

from mlx_parallm.api.http.auth import has_admin_key
from mlx_parallm.engine.status import RequestDoor
from mlx_parallm.types.errors import InvalidRequestError, PermissionDeniedError
from mlx_parallm.types.json_values import is_object

# DURATION: Go's durations, such as "1h30m" and "-1s".
_PART = r"\d+(?:\.\d*)?(ns|us|µs|ms|s|m|h)"
DURATION = re.compile(rf"[+-]?(?:{_PART})+")
UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
MAX_DURATION_CHARS = 64
# MAX_S: the longest time of Go's durations, 292 years.
MAX_S = 2**63 // 10**9


def _seconds(value: object) -> float:
    """Return a time in seconds, infinite for a negative one, as Ollama reads ``keep_alive``."""
    if isinstance(value, str):
        value = _read_duration(value)
    # No comparison with NaN is true, and Python compares numbers that are too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not value <= MAX_S:
        raise ValueError(
            f'must be seconds, or a duration such as "5m", up to {MAX_S} s; negative is for ever'
        )
    return math.inf if value < 0 else float(value)


def _read_duration(text: str) -> float | None:
    """Return a duration in seconds; None if it is none. A number alone is seconds."""
    if len(text) > MAX_DURATION_CHARS:
        return None
    if re.fullmatch(r"[+-]?\d+", text):
        return float(text)
    if not DURATION.fullmatch(text):
        return None
    parts = re.finditer(_PART, text)
    size = sum(float(part[0].removesuffix(part[1])) * UNITS_S[part[1]] for part in parts)
    return -size if text.startswith("-") else size


KeepAlive = Annotated[
    float | None,
    BeforeValidator(_seconds),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]}),
    Field(description='Seconds or "5m": the time in memory after this request; -1 is for ever.'),
]


class KeepAliveFields(BaseModel):
    """Fields of bodies for a model that stays in memory for a while; see ``KeepAliveTime``."""

    ttl: KeepAlive = None
    keep_alive: KeepAlive = None


@dataclass(frozen=True, slots=True)
class KeepAliveTime:
    """The time that a model stays in memory after a request.

    Attributes:
        seconds: infinite for ever; None if the body names none.
    """

    seconds: float | None = None

    @classmethod
    def of(cls, request: Request) -> KeepAliveTime:
        """Return the time of a request that has read its body.

        Raises:
            InvalidRequestError: it is no time.
            PermissionDeniedError: it is longer than ``--model-ttl``, and the key is no admin key.
        """
        value: Any = getattr(request, "value", None)
        if not is_object(value):
            return cls()
        times = [
            _allowed(request, _read(value[name], name), name)
            for name in KeepAliveFields.model_fields
            if value.get(name) is not None
        ]
        return cls(times[-1]) if times else cls()

    def set(self, engine: RequestDoor, model: str) -> None:
        """Let the model of a name stay for this time, once its request was admitted."""
        if self.seconds is not None:
            engine.set_ttl(model, None if math.isinf(self.seconds) else self.seconds)


def _allowed(request: Request, seconds: float, name: str) -> float:
    most_s = request.app.state.engine.config.loading.ttl_s
    if most_s is not None and seconds > most_s and not has_admin_key(request):
        raise PermissionDeniedError(
            f"{name} is longer than {most_s:g} s (--model-ttl), for which the admin key is needed.",
            param=name,
        )
    return seconds


def _read(value: object, name: str) -> float:
    try:
        return _seconds(value)
    except ValueError as problem:
        raise InvalidRequestError(f"{name} {problem}.", param=name) from None
