"""Fleets whose engines die, and what has become of their requests."""

from __future__ import annotations

from typing import Any, cast

from mlx_parallm.types.events import ErrorEvent, TokenEvent
from tests.fleet_harness import Answer, FakeFleet


def end(fleet: FakeFleet) -> None:
    """Let the engines load that wait to, and stop all."""
    for life in fleet.lives:
        life.fails_to_load = False
        life.may_load.set()
    fleet.stop()


def rank_of(fleet: FakeFleet, request_id: str) -> int:
    return fleet.router.placements[request_id].rank


def errors(fleet: FakeFleet) -> dict[str, type[Exception]]:
    return {
        event.request_id: type(event.error)
        for event in fleet.events
        if isinstance(event, ErrorEvent)
    }


def finish(fleet: FakeFleet) -> set[str]:
    """Let all engines answer everything; return the ids of all requests that have ended so."""
    # Requests move to what has nothing to do, and suspects are begun one after another.
    while fleet.router.placements:
        for rank in range(len(fleet.lives)):
            fleet.order(rank, Answer(is_last=True))
    return {
        event.request_id
        for event in fleet.events
        if isinstance(event, TokenEvent) and event.finish_reason is not None
    }


def kill_with(fleet: FakeFleet, request_id: str) -> int:
    """Let an engine die of a request, which is a suspect from then on; return the engine."""
    assert fleet.submit(request_id) is None
    fleet.leave_dead(rank := rank_of(fleet, request_id))
    return rank


def held(fleet: FakeFleet) -> list[str]:
    """Return the requests that engines have which live."""
    fleet.settle()
    living = [member.life for member in fleet.fleet._members if member.is_serving]
    return [request_id for life in living for request_id in cast(Any, life).requests]
