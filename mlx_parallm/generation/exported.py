"""Questions of other servers about KV, asked in the engines' process; see ``Ask``."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pickle import PickleBuffer

from mlx_parallm.engine.models import EngineState, ServedEngine
from mlx_parallm.generation.kv_cache.peer.exports import Exports
from mlx_parallm.types.errors import NotFoundError


def read_filter(state: EngineState, owner: str) -> Future[bytes]:
    """Return a server's uid and the filter of what it has of a model.

    Raises:
        NotFoundError: no model has this identity.
    """
    _, exports = _exports(state, owner)
    return exports.filter()


def read_blocks(
    state: EngineState, owner: str, contents: Sequence[bytes], *, waits: bool = False
) -> Future[list[PickleBuffer]]:
    """Return the leading blocks of a chain that are here; none while the model is paused.

    ``waits``: the first one is being computed, and is awaited.

    Raises:
        NotFoundError: no model has this identity.
    """
    engine, exports = _exports(state, owner)
    if engine.is_paused:
        none: Future[list[PickleBuffer]] = Future()
        none.set_result([])
        return none
    return exports.ask(contents, waits=waits)


def find_weights(state: EngineState, owner: str, content: str) -> tuple[str, str | None]:
    """Return the first name of a model, and that of an adapter of it, by their lasting content.

    Raises:
        NotFoundError: no model has this identity, or it has other weights.
    """
    engine, _ = _exports(state, owner)
    policies = engine.policies
    names = [None, *(info.name for info in policies.infos())]
    for name in names:
        if policies.weights_of(name).lasting_content == content:
            return policies.model, name
    raise NotFoundError("The model here has other weights, or lacks the adapter.")


def _exports(state: EngineState, owner: str) -> tuple[ServedEngine, Exports]:
    for engine in tuple(state.engines.values()):
        # Models of other kinds have none.
        exports: Exports | None = getattr(engine, "exports", None)
        if exports is not None and exports.owner == owner:
            return engine, exports
    raise NotFoundError("No model here has this identity: its KV would not be the same.")
