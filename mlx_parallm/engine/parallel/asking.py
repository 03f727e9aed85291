"""Questions that any of several engines can answer, because they serve the same models."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any

from typing_extensions import override

from mlx_parallm.engine.models import Ask, EngineState
from mlx_parallm.engine.parallel.suspects import LEAST_SERVING, MAX_DEATHS, LatestKeys
from mlx_parallm.types.errors import EngineDeadError, RequestLostError


class SharedAsk(Ask):
    """Implements ``Ask``: an engine that lives answers.

    If it dies meanwhile, another one does, unless the question may end the last one too; see
    ``suspects``. Questions with equal keys go to the same engine while it lives, so that it finds
    what it has computed for the earlier ones. A question that comes again after engines died of it
    is asked only while another engine would be left.

    Attributes:
        engines: ask one engine each.
        count_live: returns how many of them answer questions.
    """

    def __init__(self) -> None:
        self.engines: Sequence[Ask] = ()
        self.count_live: Callable[[], int] = lambda: len(self.engines)
        # The contents of questions that engines died of, and that none has answered since.
        self._deadly = LatestKeys()

    @override
    def __call__(self, question: Callable[[EngineState], Any], key: Hashable = None) -> Future[Any]:
        """The answer is an EngineDeadError if no engine lives, or those died that were asked."""
        # The order of the others stays as it is when an engine dies (rendezvous hashing).
        ranks = range(len(self.engines))
        order = sorted(ranks, key=lambda rank: hash((key, rank)), reverse=True)
        engines = [self.engines[rank] for rank in order]
        pending = _Pending(question, key, engines, self.count_live, self._deadly)
        pending.ask_next()
        return pending.answer


class _Pending:
    """A question, and the engines that have not been asked.

    Attributes:
        answer: what the caller waits for.
    """

    def __init__(
        self,
        question: Callable[[EngineState], Any],
        key: Hashable,
        engines: Sequence[Ask],
        count_live: Callable[[], int],
        deadly: LatestKeys,
    ) -> None:
        self.answer: Future[Any] = Future()
        self._question = question
        self._key = key
        self._engines = iter(engines)
        self._count_live = count_live
        self._deadly = deadly
        # Its hash, because a key may be a long text. A question without a key is not remembered.
        self._content = None if key is None else hash(key)
        self._num_deaths = int(self._content in deadly)

    def ask_next(self) -> None:
        """Let the next engine that lives answer, unless the caller was cancelled."""
        if self.answer.cancelled():
            return
        is_lost = self._num_deaths >= MAX_DEATHS
        if is_lost or (self._num_deaths and self._count_live() < LEAST_SERVING):
            _settle(self.answer, RequestLostError("The engine died that was to answer."))
            return
        for ask in self._engines:
            try:
                inner = ask(self._question, self._key)
            except EngineDeadError:
                continue
            inner.add_done_callback(self._pass_on)
            self.answer.add_done_callback(partial(_withdraw, inner))
            return
        _settle(self.answer, EngineDeadError("No engine is loaded."))

    def _pass_on(self, inner: Future[Any]) -> None:
        if inner.cancelled():
            self.answer.cancel()
        elif isinstance(error := inner.exception(), EngineDeadError):
            self._num_deaths += 1
            self._deadly.add(self._content)
            self.ask_next()
        else:
            self._deadly.discard(self._content)
            _settle(self.answer, inner.result() if error is None else error)


def _withdraw(inner: Future[Any], answer: Future[Any]) -> None:
    if answer.cancelled():
        inner.cancel()


def _settle(answer: Future[Any], value: Any) -> None:
    try:
        if isinstance(value, BaseException):
            answer.set_exception(value)
        else:
            answer.set_result(value)
    except InvalidStateError:
        # The caller was cancelled meanwhile.
        return
