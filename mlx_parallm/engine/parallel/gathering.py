"""The replies of several engines to one command, which become one reply."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mlx_parallm.engine.commands import Call, Change, JoinsResults
from mlx_parallm.types.errors import EngineDeadError, ParallmError


class Gathering:
    """A command that engines carry out, until the last of them has.

    Its methods are called under one lock.
    """

    def __init__(self, command: Call, ranks: Collection[int]) -> None:
        """``ranks`` are the numbers of the engines that were given the command."""
        self.command = command
        self._missing = set(ranks)
        self._results: dict[int, Any] = {}

    @property
    def is_complete(self) -> bool:
        """True once every engine has replied or died."""
        return not self._missing

    def add(self, rank: int, result: Any) -> None:
        """Take an engine's reply."""
        self._missing.discard(rank)
        self._results[rank] = result

    def drop(self, rank: int) -> None:
        """Wait no longer for an engine, which is dead."""
        self._missing.discard(rank)

    def failed(self) -> dict[int, ParallmError]:
        """Return the errors of engines that have not changed as others have, by their numbers."""
        refusals = {
            rank: result
            for rank, result in self._results.items()
            if isinstance(result, ParallmError)
        }
        is_mixed = len(refusals) < len(self._results)
        return refusals if is_mixed and isinstance(self.command.action, Change) else {}

    def result(self) -> Any:
        """Return one result, or the refusal of an engine if one refused.

        Engines that have failed do not count.
        """
        failed = self.failed()
        results = [self._results[rank] for rank in sorted(self._results) if rank not in failed]
        refusals = [result for result in results if isinstance(result, ParallmError)]
        if refusals or not results:
            return refusals[0] if refusals else EngineDeadError("No engine is left.")
        action = self.command.action
        if not isinstance(action, JoinsResults):
            return results[0]
        try:
            return action.together(results)
        except ParallmError as refusal:
            return refusal
