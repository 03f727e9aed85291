"""Requests that have not ended, and the parts of them that engines have.

A request of several samples may be divided: each engine gets a request for some of the samples. Its
reader sees the events of one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, cast, runtime_checkable

from mlx_parallm.engine.commands import Submit
from mlx_parallm.types.events import TokenEvent
from mlx_parallm.types.work import Ends, Event


@runtime_checkable
class SampledRequest(Protocol):
    """A request whose samples are drawn: sample i by the seed of the request, plus i."""

    @property
    def reports_prompt(self) -> bool:
        """True if the event of the prompt has more than counts in it."""
        ...

    def with_seed(self, draw: Callable[[], int], /) -> Self:
        """Return it with a seed, which ``draw`` returns unless the request has one."""
        ...

    def part(self, request_id: str, first: int, count: int, /) -> Self:
        """Return a request for ``count`` of its samples, from ``first`` on; it has a seed."""
        ...


def seeded(command: Submit, draw: Callable[[], int]) -> Submit:
    """Return a command whose request has a seed, if its samples are drawn.

    Engines that draw seeds themselves would draw the same ones for different requests.
    """
    request = command.request
    if not isinstance(request, SampledRequest):
        return command
    return replace(command, request=cast("Any", request.with_seed(draw)))


@dataclass(slots=True, eq=False)
class Part:
    """The samples of a request that one engine has; all of them if it is not divided.

    Attributes:
        whole: the request.
        command: what the engine is given, but for the reply.
        first: the index of its first sample in the request.
        is_admitted: True once an engine has admitted it.
        num_sent: how often it was given to an engine.
        is_answered: True once the engine that was given it last has replied.
    """

    whole: OpenRequest
    command: Submit
    first: int
    is_admitted: bool = False
    num_sent: int = 0
    is_answered: bool = False


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended.

    Attributes:
        command: as it was submitted.
        parts: those that have not ended, by their ids.
        is_admitted: True once its caller has had the reply.
        is_cancelled: True once cancelled; its reader gets a last event.
    """

    command: Submit
    parts: dict[str, Part] = field(default_factory=dict[str, Part])
    is_admitted: bool = False
    is_cancelled: bool = False
    _is_divided: bool = False
    _has_prompt: bool = False
    # Events that came before those of the part that scores the prompt; None: none are held.
    _early: list[Event] | None = None

    @property
    def request_id(self) -> str:
        """Return the id of the request."""
        return self.command.request.request_id

    def add_whole(self) -> str:
        """Let one engine have all of it; return the part's id, which is the request's."""
        self.parts[self.request_id] = Part(self, self.command, 0)
        return self.request_id

    def add_part(self, part_id: str, first: int, count: int) -> str:
        """Let an engine have some samples; return ``part_id``."""
        request = cast("SampledRequest", self.command.request)
        part = cast("Any", request.part(part_id, first, count))
        self.parts[part_id] = Part(self, replace(self.command, request=part), first)
        self._is_divided = True
        if request.reports_prompt:
            self._early = []
        return part_id

    def read(self, part: Part, event: Event) -> Sequence[Event]:
        """Return what the reader sees of a part's event: the events of one engine, in order."""
        if not self._is_divided:
            return (event,)
        if event.num_tokens == 0 and event.ends is Ends.NOTHING:
            # Every part computes the prompt.
            if self._has_prompt or (self._early is not None and part.first):
                return ()
            self._has_prompt = True
        shown = self._as_whole(part, event)
        if self._early is None:
            return (shown,)
        if part.first and event.ends is not Ends.REQUEST:
            self._early.append(shown)
            return ()
        early, self._early = self._early, None
        return (shown, *early) if event.ends is not Ends.REQUEST else (shown,)

    def _as_whole(self, part: Part, event: Event) -> Event:
        if isinstance(event, TokenEvent):
            return replace(event, request_id=self.request_id, index=part.first + event.index)
        return replace(cast("Any", event), request_id=self.request_id)
