"""Requests that have not ended, and the parts of them that engines have.

A request of several samples or inputs may be divided: each engine gets a request for some of them.
Its reader sees the events of one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, cast, runtime_checkable

from mlx_parallm.engine.commands import Submit
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from mlx_parallm.types.work import Ends, Event, RequestWork


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

    def part(self, request_id: str, places: Sequence[int], /) -> Self:
        """Return a request for the samples of these indices, without gaps; it has a seed."""
        ...


@runtime_checkable
class JoinedRequest(Protocol):
    """A request whose inputs are answered by one event, and may be computed apart."""

    def part(self, request_id: str, places: Sequence[int], /) -> Self:
        """Return a request for the inputs of these indices."""
        ...

    def joined(self, answers: Sequence[tuple[Sequence[int], Any]], /) -> Event:
        """Return the answer to all inputs, for the indices and the answer of each part."""
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
    """The samples or inputs of a request that one engine has; all of them if it is not divided.

    Attributes:
        whole: the request.
        command: what the engine is given, but for the reply.
        places: the indices of its samples or inputs in the request.
        is_admitted: True once an engine has admitted it.
        num_sent: how often it was given to an engine.
        is_answered: True once the engine that was given it last has replied.
    """

    whole: OpenRequest
    command: Submit
    places: Sequence[int]
    is_admitted: bool = False
    num_sent: int = 0
    is_answered: bool = False


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended.

    Attributes:
        command: as it was submitted.
        parts: those that have not ended, by their ids.
        num_deaths: engines that died while they may have computed it, or, as 1, an earlier request
            of the same content.
        is_admitted: True once its caller has had the reply.
        is_cancelled: True once cancelled; its reader gets a last event.
    """

    command: Submit
    parts: dict[str, Part] = field(default_factory=dict[str, Part])
    num_deaths: int = 0
    is_admitted: bool = False
    is_cancelled: bool = False
    _is_divided: bool = False
    _has_prompt: bool = False
    # Events that came before those of the part that scores the prompt; None: none are held.
    _early: list[Event] | None = None
    # Answers of parts of a ``JoinedRequest``, with the indices of their inputs.
    _answers: list[tuple[Sequence[int], Event]] = field(
        default_factory=list[tuple[Sequence[int], Event]]
    )

    @property
    def request_id(self) -> str:
        """Return the id of the request."""
        return self.command.request.request_id

    def add_whole(self) -> str:
        """Let one engine have all of it; return the part's id, which is the request's."""
        self.parts[self.request_id] = Part(self, self.command, (0,))
        return self.request_id

    def add_part(self, part_id: str, places: Sequence[int]) -> RequestWork:
        """Let an engine have the samples or inputs of these indices; return how much work it is."""
        request = cast("SampledRequest | JoinedRequest", self.command.request)
        part = cast("Any", request.part(part_id, places))
        self.parts[part_id] = Part(self, replace(self.command, request=part), places)
        self._is_divided = True
        if isinstance(request, SampledRequest) and request.reports_prompt:
            self._early = []
        return part.work()

    def read(self, part: Part, event: Event) -> Sequence[Event]:
        """Return what the reader sees of a part's event: the events of one engine, in order."""
        if not self._is_divided:
            return (event,)
        request = self.command.request
        if isinstance(request, JoinedRequest) and not isinstance(event, ErrorEvent):
            self._answers.append((part.places, event))
            return () if self.parts else (request.joined(self._answers),)
        first = part.places[0]
        if event.num_tokens == 0 and event.ends is Ends.NOTHING:
            # Every part computes the prompt.
            if self._has_prompt or (self._early is not None and first):
                return ()
            self._has_prompt = True
        shown = self._as_whole(part, event)
        if self._early is None:
            return (shown,)
        if first and event.ends is not Ends.REQUEST:
            self._early.append(shown)
            return ()
        early, self._early = self._early, None
        return (shown, *early) if event.ends is not Ends.REQUEST else (shown,)

    def _as_whole(self, part: Part, event: Event) -> Event:
        if isinstance(event, TokenEvent):
            return replace(event, request_id=self.request_id, index=part.places[0] + event.index)
        return replace(cast("Any", event), request_id=self.request_id)
