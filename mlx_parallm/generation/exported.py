"""Questions of other servers about KV, asked in the engines' process; see ``Ask``.

Models of equal identity, such as a base and a tune of it, differ in the contents of their blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from mlx_parallm.engine.models import EngineState, ServedEngine
from mlx_parallm.generation.kv_cache.peer.exports import Exports, SentBlock
from mlx_parallm.generation.kv_cache.peer.filters import UID_BYTES, union_of
from mlx_parallm.types.errors import NotFoundError

T = TypeVar("T")


def read_filter(state: EngineState, owner: str) -> Future[bytes]:
    """Return a server's uid and the filter of what it has of all models of an identity.

    Raises:
        NotFoundError: no model has this identity.
    """
    return _Answers([exports.filter() for _, exports in _exports(state, owner)], joined).answer


def read_blocks(
    state: EngineState, owner: str, contents: Sequence[bytes], *, waits: bool = False
) -> Future[list[SentBlock]]:
    """Return the leading blocks of a chain that are here; none of models that are paused.

    ``waits``: the first one is being computed, and is awaited.

    Raises:
        NotFoundError: no model has this identity.
    """
    running = [exports for engine, exports in _exports(state, owner) if not engine.is_paused]
    answers = [exports.ask(contents, waits=waits) for exports in running]
    return _Answers(answers, _longest, is_enough=bool).answer


def find_weights(state: EngineState, owner: str, content: str) -> tuple[str, str | None]:
    """Return the first name of a model, and that of an adapter of it, by their lasting content.

    Raises:
        NotFoundError: no model has this identity, or they have other weights.
    """
    for engine, _ in _exports(state, owner):
        for name, known in engine.policies.lasting_contents().items():
            if known == content:
                return engine.policies.model, name
    raise NotFoundError("The model here has other weights, or lacks the adapter.")


def _exports(state: EngineState, owner: str) -> list[tuple[ServedEngine, Exports]]:
    """Return the engines of an identity; raise NotFoundError if there is none."""
    # Models of other kinds have no exports.
    pairs = [(engine, getattr(engine, "exports", None)) for engine in tuple(state.engines.values())]
    known = [(engine, each) for engine, each in pairs if each is not None and each.owner == owner]
    if not known:
        raise NotFoundError("No model here has this identity: its KV would not be the same.")
    return known


def joined(filters: Sequence[bytes]) -> bytes:
    """Return one filter, with the uid that all have, of what is in any."""
    return filters[0][:UID_BYTES] + union_of([each[UID_BYTES:] for each in filters])


def _longest(answers: Sequence[list[SentBlock]]) -> list[SentBlock]:
    none: list[SentBlock] = []
    return max(answers, key=len, default=none)


class _Answers(Generic[T]):
    """Joins the answers of several engines to one, once all are there or one is enough.

    Attributes:
        answer: the joined one; cancelling it cancels all.
    """

    def __init__(
        self,
        parts: Sequence[Future[T]],
        join: Callable[[Sequence[T]], T],
        is_enough: Callable[[T], bool] = lambda _: False,
    ) -> None:
        self.answer: Future[T] = Future()
        self._parts, self._join, self._is_enough = parts, join, is_enough
        self._lock = threading.Lock()
        self._is_over = False
        self._results: list[T] = []
        self._num_left = len(parts)
        self.answer.add_done_callback(lambda _: self._cancel())
        for part in parts:
            part.add_done_callback(self._note)
        if not parts:
            self._end()

    def _cancel(self) -> None:
        for part in self._parts:
            part.cancel()

    def _note(self, part: Future[T]) -> None:
        with self._lock:
            self._num_left -= 1
            is_last, is_good = not self._num_left, not part.cancelled() and not part.exception()
            if is_good:
                self._results.append(part.result())
            is_over = is_last or (is_good and self._is_enough(self._results[-1]))
            if self._is_over or not is_over:
                return
            self._is_over = True
        self._end()

    def _end(self) -> None:
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(self._join(self._results))
            except Exception as problem:  # noqa: BLE001 - the caller gets it
                self.answer.set_exception(problem)
