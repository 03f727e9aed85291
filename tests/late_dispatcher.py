"""A dispatcher that submits as late as it may, and a watch on what uses MLX before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from typing_extensions import override

from mlx_parallm.worker.device.dispatcher import Dispatch, Dispatcher

#: ``USES``: functions of MLX that may be called only while nothing is being submitted.
USES = ("eval", "async_eval", "synchronize", "clear_cache")


class SubmissionWatch:
    """Notes which functions of MLX are called while a graph waits to be submitted.

    Attributes:
        misuses: their names.
        num_submitted: graphs that were submitted.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.misuses: list[str] = []
        self.num_submitted = 0
        self._waiting: list[_LateGraph] = []
        self._submit = mx.async_eval
        for name in USES:
            monkeypatch.setattr(mx, name, self._noting(name, getattr(mx, name)))

    @property
    def is_submitting(self) -> bool:
        """True if a graph waits to be submitted."""
        return bool(self._waiting)

    def dispatcher(self) -> Dispatcher:
        """Return a dispatcher that submits when it is joined."""
        return _LateDispatcher(self)

    def begin(self, arrays: Sequence[Any]) -> _LateGraph:
        """Keep a graph until ``submit``."""
        graph = _LateGraph(self, arrays)
        self._waiting.append(graph)
        return graph

    def submit(self) -> None:
        """Submit the graph that waits, if there is one."""
        while self._waiting:
            graph = self._waiting.pop()
            self.num_submitted += 1
            self._submit(graph.arrays)
            graph.arrays = ()

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            # Without arrays nothing is evaluated.
            if self._waiting and (tree_flatten(list(arguments)) or not name.endswith("eval")):
                self.misuses.append(name)
            return function(*arguments)

        return noted


class _LateGraph(Dispatch):
    def __init__(self, watch: SubmissionWatch, arrays: Sequence[Any]) -> None:
        self.arrays = arrays
        self._watch = watch

    @override
    def end(self) -> None:
        if self.arrays:
            self._watch.submit()


class _LateDispatcher(Dispatcher):
    def __init__(self, watch: SubmissionWatch) -> None:
        self._watch = watch

    @override
    def begin(self, arrays: Sequence[Any]) -> Dispatch:
        self.join()
        return self._watch.begin(arrays)

    @override
    def join(self) -> None:
        self._watch.submit()

    @override
    def close(self) -> None:
        self.join()

    @property
    @override
    def runs_beside(self) -> bool:
        return True
