"""Questions of other servers about KV, asked in the engines' process; see ``Ask``."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from mlx_parallm.engine.models import EngineState, ServedEngine
from mlx_parallm.generation.kv_cache.peer.exports import Exports
from mlx_parallm.types.content import Buffer
from mlx_parallm.types.errors import NotFoundError


def read_filter(state: EngineState, owner: str) -> Future[bytes]:
    """Return a server's uid and the filter of what it has of a model.

    Raises:
        NotFoundError: no model has this identity.
    """
    _, exports = _exports(state, owner)
    return exports.filter()


def read_blocks(state: EngineState, owner: str, contents: Sequence[bytes]) -> Future[list[Buffer]]:
    """Return the leading blocks of a chain that are here; none while the model is paused.

    Raises:
        NotFoundError: no model has this identity.
    """
    engine, exports = _exports(state, owner)
    if engine.is_paused:
        none: Future[list[Buffer]] = Future()
        none.set_result([])
        return none
    return exports.ask(contents)


def _exports(state: EngineState, owner: str) -> tuple[ServedEngine, Exports]:
    for engine in tuple(state.engines.values()):
        # Models of other kinds have none.
        exports: Exports | None = getattr(engine, "exports", None)
        if exports is not None and exports.owner == owner:
            return engine, exports
    raise NotFoundError("No model here has this identity: its KV would not be the same.")
