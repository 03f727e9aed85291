"""What commands do to all models of the engine thread, between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlx_parallm.engine.commands import EngineHost
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.live_weights import SLEEP_TAGS, LiveWeights
from mlx_parallm.engine.policies import AdapterInfo, Policies
from mlx_parallm.errors import InvalidRequestError, ModelNotFoundError
from mlx_parallm.weights import WeightsVersion

#: All adapters, and the versions of the models themselves by their first names.
Loaded = tuple[Sequence[AdapterInfo], Mapping[str, WeightsVersion]]


def loaded(host: EngineHost) -> Loaded:
    """What requests are computed with; encoders stay as they were loaded."""
    policies = [one.policies for one in host.engines.values()]
    policies += [one.policies for one in host.encoder_adapters.values()]
    infos = [info for one in policies for info in one.infos()]
    return infos, {name: one.policies.base.version for name, one in host.engines.items()}


def policies_of(host: EngineHost, model: str) -> Policies:
    """What requests of a model are computed with; raise ModelNotFoundError."""
    if model in host.engines:
        return host.engines[model].policies
    if model in host.encoder_adapters:
        return host.encoder_adapters[model].policies
    raise ModelNotFoundError(model)


def check_owner(host: EngineHost, name: str, model: str) -> None:
    """Raise InvalidRequestError if another model than this one has an adapter of this name."""
    owners = (info for info in loaded(host)[0] if info.name == name and info.model != model)
    if (info := next(owners, None)) is not None:
        raise taken(info)


def taken(info: AdapterInfo) -> InvalidRequestError:
    """The refusal of another adapter of this one's name."""
    return InvalidRequestError(
        f"{info.name!r} is an adapter of {info.model!r}; unload it first.", param="name"
    )


def pause(host: EngineHost) -> int:
    """Generate nothing more; how many requests are kept."""
    for engine in host.engines.values():
        engine.is_paused = True
        # No token may come after the answer.
        host.deliver(engine.settle())
    return sum(engine.num_requests for engine in host.engines.values())


def live_weights(engine: Engine) -> LiveWeights:
    """A model's own weights; raise InvalidRequestError if they never change."""
    if engine.live is None:
        raise InvalidRequestError("The weights of this model cannot be changed.", param="model")
    return engine.live


def sleep(host: EngineHost, level: int) -> None:
    """Give back memory of every model; see ``LiveWeights.sleep``."""
    for engine in host.engines.values():
        live_weights(engine).sleep(level)


def wake(host: EngineHost, tags: Sequence[str]) -> list[str]:
    """Have memory back; what of ``SLEEP_TAGS`` still sleeps."""
    lives = [live_weights(engine) for engine in host.engines.values()]
    for live in lives:
        live.wake(tags)
    return [tag for tag in SLEEP_TAGS if any(tag in live.asleep for live in lives)]


def resume(host: EngineHost) -> None:
    """Generate again."""
    for engine in host.engines.values():
        engine.is_paused = False
