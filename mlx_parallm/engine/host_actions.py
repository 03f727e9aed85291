"""What commands do to all models of the engine thread, between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from mlx_parallm.engine.adapter_staging import AdapterStaging
from mlx_parallm.engine.commands import EngineHost
from mlx_parallm.engine.interface import ServedEngine
from mlx_parallm.engine.live_weights import SLEEP_TAGS, LiveWeights, WeightsUpdate
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload, Policies
from mlx_parallm.types.errors import InvalidRequestError, ModelNotFoundError
from mlx_parallm.types.weights import WeightsVersion

#: All adapters, and the versions of the models themselves by their first names.
Loaded = tuple[Sequence[AdapterInfo], Mapping[str, WeightsVersion]]


def loaded(host: EngineHost) -> Loaded:
    """Return what requests are computed with; versions are of models whose weights can change."""
    infos = [info for one in host.adapters.values() for info in one.policies.infos()]
    changeable = {name: one for name, one in host.engines.items() if one.live is not None}
    return infos, {name: one.adapters.policies.base.version for name, one in changeable.items()}


def policies_of(host: EngineHost, model: str) -> Policies:
    """Return what requests of a model are computed with; raise ModelNotFoundError."""
    if model not in host.adapters:
        raise ModelNotFoundError(model)
    return host.adapters[model].policies


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


def begin_adapter(
    host: EngineHost, number: int, upload: AdapterUpload, model: str, *, in_parts: bool
) -> tuple[AdapterInfo, Loaded] | None:
    """Put the first part of an adapter into a slot; see ``advance_adapter``."""
    host.stagings[number] = AdapterStaging(upload, model, in_parts=in_parts)
    return advance_adapter(host, number)


def advance_adapter(host: EngineHost, number: int) -> tuple[AdapterInfo, Loaded] | None:
    """Put the next part; the adapter and all that is loaded once all of it is there.

    Raises as ``AdapterStaging.advance`` does; the number is free then.
    """
    staging = host.stagings.pop(number)
    model = staging.model
    check = partial(check_owner, host, staging.upload.name, model)
    info = staging.advance(policies_of(host, model), check)
    if info is not None:
        return info, loaded(host)
    host.stagings[number] = staging
    return None


def ensure_adapter(host: EngineHost, upload: AdapterUpload, model: str) -> AdapterInfo:
    """Load an adapter of a model unless one of its name is there; see ``Policies.ensure``."""
    check_owner(host, upload.name, model)
    return policies_of(host, model).ensure(upload)


def unload_adapter(host: EngineHost, name: str, model: str) -> AdapterInfo:
    """Forget an adapter of a model; see ``Policies.unload``."""
    return policies_of(host, model).unload(name)


def pause(host: EngineHost) -> int:
    """Generate nothing more; how many requests are kept."""
    for engine in host.engines.values():
        engine.is_paused = True
        # No token may come after the answer.
        host.deliver(engine.settle())
    return sum(engine.num_requests for engine in host.engines.values())


def reset_prefix_cache(host: EngineHost, *, reset_running: bool) -> None:
    """Forget the prefixes of every model; see ``Engine.reset_prefix_cache``."""
    for engine in host.engines.values():
        host.deliver(engine.settle())
        engine.reset_cache(reset_running=reset_running)


def update_weights(host: EngineHost, model: str, update: WeightsUpdate) -> WeightsVersion:
    """Replace a model's weights; see ``LiveWeights.update``."""
    engine = host.engines[model]
    # Its tokens are those of the old weights.
    host.deliver(engine.settle())
    return live_weights(engine).update(update)


def checksums(host: EngineHost, model: str) -> Mapping[str, str]:
    """Of a model's weights; see ``LiveWeights.checksums``."""
    return live_weights(host.engines[model]).checksums()


def relabel(host: EngineHost, model: str, label: str) -> WeightsVersion:
    """Call a model's weights something else; see ``LiveWeights.relabel``."""
    return live_weights(host.engines[model]).relabel(label)


def live_weights(engine: ServedEngine) -> LiveWeights:
    """A model's own weights; raise InvalidRequestError if they never change."""
    if engine.live is None:
        raise InvalidRequestError("The weights of this model cannot be changed.", param="model")
    return engine.live


def sleep(host: EngineHost, level: int) -> None:
    """Free memory of every model that can do without; see ``LiveWeights.sleep``."""
    for live in _lives(host):
        live.sleep(level)


def wake(host: EngineHost, tags: Sequence[str]) -> list[str]:
    """Have memory again; return what of ``SLEEP_TAGS`` still sleeps."""
    lives = _lives(host)
    for live in lives:
        live.wake(tags)
    return [tag for tag in SLEEP_TAGS if any(tag in live.asleep for live in lives)]


def _lives(host: EngineHost) -> list[LiveWeights]:
    return [one.live for one in host.engines.values() if one.live is not None]


def resume(host: EngineHost) -> None:
    """Generate again."""
    for engine in host.engines.values():
        engine.is_paused = False
