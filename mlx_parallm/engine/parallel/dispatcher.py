"""The requests of several engines: which of them has which, and what their readers see."""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from mlx_parallm.engine.commands import Abort, Submit
from mlx_parallm.engine.life import Deliver
from mlx_parallm.engine.parallel.member import Member
from mlx_parallm.engine.parallel.parts import OpenRequest, Part, seeded
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.engine.parallel.suspects import (
    LEAST_SERVING,
    MAX_DEATHS,
    MAX_WAITING,
    Suspects,
)
from mlx_parallm.engine.status import Readiness
from mlx_parallm.types.errors import (
    OverloadedError,
    ParallmError,
    RequestAbortedError,
    RequestLostError,
)
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.work import Event, RequestWork

# SEED_BITS: bits of a seed that is drawn, as many as an engine draws.
SEED_BITS = 31


class Dispatcher:
    """Gives requests, or parts of them, to engines, and passes on what these answer.

    Its methods are called under the lock of the fleet, but for ``flush``.
    """

    def __init__(
        self,
        members: Sequence[Member],
        router: Router,
        deliver: Deliver,
        lock: threading.RLock,
        seed: int,
    ) -> None:
        """Begin without requests.

        Args:
            members: the engines.
            router: chooses among them.
            deliver: takes the events.
            lock: the fleet's; replies of engines come on any thread.
            seed: draws the seeds of requests without one.
        """
        self._members = members
        self._router = router
        self._deliver = deliver
        self._lock = lock
        self._open: dict[str, OpenRequest] = {}
        # The parts of all requests by their ids.
        self._parts: dict[str, Part] = {}
        self._suspects = Suspects(len(members))
        # Events that were read and not delivered yet, and what puts the deliveries in order.
        self._outbox: list[Event] = []
        self._delivery = threading.Lock()
        self._seeds = random.Random(seed)
        # No client can guess it, so no request's id is that of another one's part.
        self._nonce = secrets.token_hex(8)

    def submit(self, command: Submit) -> None:
        """Give a request to an engine, or parts of it to several; refuse one that cannot go on."""
        request = OpenRequest(seeded(command, lambda: self._seeds.getrandbits(SEED_BITS)))
        work = request.command.request.work()
        refusal = self._router.refusal(work)
        if refusal is not None:
            command.reply(refusal)
            return
        is_suspect = self._suspects.has(request.command.request)
        if is_suspect and len(self._suspects.waiting) >= MAX_WAITING:
            num_waiting = len(self._suspects.waiting)
            command.reply(OverloadedError(f"{num_waiting} requests like it are waiting already."))
            return
        self._open[request.request_id] = request
        if is_suspect:
            # It is not divided: it could end several engines at once.
            request.num_deaths = 1
            part_id = request.add_whole()
            self._parts[part_id] = request.parts[part_id]
            self._suspects.waiting[part_id] = False
            self.release()
            return
        for part_id, rank in self._place(request, work).items():
            self._send(part_id, rank)

    def abort(self, command: Abort) -> None:
        """End a request where it is."""
        request = self._open.get(command.request_id)
        if request is None:
            return
        if not command.is_notified:
            self._end(request)
            self.release()
            return
        request.is_cancelled = True
        if not self._suspects.waiting.keys().isdisjoint(request.parts):
            self._fail(request, RequestAbortedError("The request was aborted."))
            self.release()
            # A delivery may wait for the event loop, which may be the caller.
            threading.Thread(target=self.flush, daemon=True).start()
            return
        for part_id in request.parts:
            self._abort_part(part_id, is_notified=True)

    def hand_over(self, rank: int, *, was_killed: bool) -> None:
        """Let other engines begin what a dead one has given no token of, and end the rest.

        Args:
            rank: the dead engine.
            was_killed: what it computed may have killed it.
        """
        self._note_silence()
        anew, lost = self._router.on_death(rank)
        left = self._suspects.take_left(rank)
        if was_killed:
            anew |= self._withdraw(rank, left)
        # A request may have several parts there. One that was not answered may have killed the
        # engine when it was read.
        ended = dict.fromkeys(self._parts[name].whole for name in lost if name in self._parts)
        begun = dict.fromkeys(
            part.whole
            for name, was_begun in anew.items()
            if (part := self._parts.get(name)) and (was_begun or not part.is_answered)
        )
        for request in (ended | begun) if was_killed else ():
            request.num_deaths += 1
            self._suspects.add(request.command.request)
            self._suspects.placed.update(request.parts)
        for request in ended | begun:
            if request in ended or request.num_deaths >= MAX_DEATHS:
                self._fail(request, RequestLostError("The engine that had this request died."))
        removed = {name: self._router.remove(name) for name in anew if name in self._parts}
        for name, placed in removed.items():
            if name in self._parts:
                self._place_again(name, has_begun=placed is not None and placed.has_begun)
        self.release()

    def lose_all(self, rank: int) -> None:
        """End every request: the dead engine was the last one."""
        self._router.on_death(rank)
        self._suspects.take_left(rank)
        error = RequestLostError("The engine that had this request died, and no other serves.")
        for request in list(self._open.values()):
            self._fail(request, error)

    def _withdraw(self, rank: int, left: Mapping[str, int | None]) -> dict[str, bool]:
        """Take back from other engines what was moved to them just before a death.

        Args:
            rank: the dead engine, which may have been computing it.
            left: what left that engine last, and its contents.

        Returns:
            The ids of the requests, with True, as ``Router.on_death`` does.
        """
        moved = dict[str, bool]()
        for part_id, content in left.items():
            self._suspects.add_content(content)
            placed = self._router.placements.get(part_id)
            if placed is not None and placed.rank != rank and not placed.is_computed:
                self._abort_part(part_id)
                moved[part_id] = True
        return moved

    def release(self) -> None:
        """Give the suspect that waits longest to an engine, if the rule of ``suspects`` allows."""
        suspects, loads = self._suspects, self._router.loads
        if not suspects.waiting:
            return
        self._note_silence()
        suspects.placed.intersection_update(self._router.placements)
        serving = [rank for rank, load in enumerate(loads) if load.is_alive and not load.is_silent]
        if suspects.placed or len(serving) < LEAST_SERVING:
            return
        if suspects.rank not in serving:
            suspects.rank = min(serving, key=lambda rank: loads[rank].num_open)
        part_id = next(iter(suspects.waiting))
        has_begun = suspects.waiting.pop(part_id)
        suspects.placed.add(part_id)
        # It does not move from an engine that it names.
        work = replace(self._parts[part_id].command.request.work(), rank=suspects.rank)
        self._send(part_id, self._router.place(part_id, work, has_begun=has_begun))

    def end_waiting(self) -> None:
        """End the suspects that wait: the engines that they wait for cannot be started."""
        error = RequestLostError("The engine that had this request died, and does not come back.")
        for part_id in list(self._suspects.waiting):
            if part_id in self._parts:
                self._fail(self._parts[part_id].whole, error)

    def take(self, rank: int, events: Sequence[Event]) -> None:
        """Read the events of an engine, but for those of requests that were moved away."""
        for event in events:
            self._outbox += self._read(rank, event)
        self._suspects.note_answer(rank)
        self._move_waiting()
        self.release()

    def flush(self) -> None:
        """Deliver the events in the order in which they were read, whichever engine they are of.

        The caller must not hold the lock, because a delivery waits for the event loop.
        """
        with self._delivery:
            with self._lock:
                events, self._outbox = self._outbox, []
            if events:
                self._deliver(events)

    def _note_silence(self) -> None:
        """Let the router know which engines answer, before it chooses."""
        for load, member in zip(self._router.loads, self._members, strict=True):
            load.is_silent = member.life.readiness()[0] is Readiness.SILENT

    def _place_again(self, part_id: str, *, has_begun: bool) -> None:
        """Give an engine a part that none has, or let it wait if it is a suspect.

        ``has_begun``: its reader knows that the prompt was computed.
        """
        part = self._parts[part_id]
        # What an engine that had it still sends is not read.
        part.num_sent += 1
        part.is_answered = False
        work = part.command.request.work()
        refusal = self._router.refusal(work)
        if refusal is not None:
            self._fail(part.whole, refusal)
        elif not part.whole.num_deaths:
            self._send(part_id, self._router.place(part_id, work, has_begun=has_begun))
        elif part.whole.is_cancelled:
            self._fail(part.whole, RequestAbortedError("The request was aborted."))
        else:
            self._suspects.waiting[part_id] = has_begun

    def _place(self, request: OpenRequest, work: RequestWork) -> dict[str, int]:
        """Choose the engine of a request, or those of its parts; return them by the parts' ids."""
        self._note_silence()
        request_id = request.request_id
        shares = self._router.divide(work)
        ranks: dict[str, int] = {}
        for share in shares:
            if len(shares) == 1:
                part_id = request.add_whole()
            else:
                part_id = f"{request_id}/{share.first}/{self._nonce}"
                work = request.add_part(part_id, share.places)
            self._router.put(part_id, work, share.rank)
            ranks[part_id] = share.rank
        self._parts.update(request.parts)
        return ranks

    def _send(self, part_id: str, rank: int) -> None:
        part = self._parts[part_id]
        part.num_sent += 1
        part.is_answered = False
        reply = partial(self._admitted, part_id, part.num_sent)
        self._members[rank].life.put(replace(part.command, reply=reply))
        if part.whole.is_cancelled:
            # The engine that cancelled it has it no more.
            self._abort_part(part_id, is_notified=True)

    def _abort_part(self, part_id: str, *, is_notified: bool = False) -> None:
        placed = self._router.placements.get(part_id)
        if placed is not None:
            request = self._parts[part_id].whole.command.request
            self._suspects.note_left(part_id, placed.rank, request)
            self._members[placed.rank].life.put(Abort(request_id=part_id, is_notified=is_notified))

    def _admitted(self, part_id: str, number: int, refusal: ParallmError | None) -> None:
        """Give the caller its reply, or the reader an error if the caller has had a reply."""
        with self._lock:
            part = self._parts.get(part_id)
            if part is None or part.num_sent != number:
                return
            request, part.is_answered = part.whole, True
            if refusal is not None:
                self._fail(request, refusal)
                self.release()
            else:
                part.is_admitted = True
                if all(each.is_admitted for each in request.parts.values()):
                    self._reply_once(request, None)
        self.flush()

    def _reply_once(self, request: OpenRequest, refusal: ParallmError | None) -> None:
        was_admitted, request.is_admitted = request.is_admitted, True
        if not was_admitted:
            request.command.reply(refusal)

    def _fail(self, request: OpenRequest, error: ParallmError) -> None:
        """End a request whose caller, or reader if the caller has had its reply, gets an error."""
        self._end(request)
        if request.is_admitted:
            self._outbox.append(ErrorEvent(request_id=request.request_id, error=error))
        self._reply_once(request, error)

    def _read(self, rank: int, event: Event) -> Sequence[Event]:
        """Count an event; return what the reader sees of it."""
        part_id = event.request_id
        part = self._parts.get(part_id)
        if part is None or not part.is_answered:
            # An engine replies before it sends events, so this one is of an earlier stay there.
            return ()
        is_shown = self._router.on_event(part_id, rank, event.num_tokens, event.ends)
        request = part.whole
        if part_id not in self._router.placements:
            del self._parts[part_id], request.parts[part_id]
            if isinstance(event, ErrorEvent) or not request.parts:
                if not request.is_cancelled and not _is_abort(event):
                    self._suspects.clear(request.command.request)
                self._end(request)
                self._reply_once(request, None)
        return request.read(part, event) if is_shown else ()

    def _move_waiting(self) -> None:
        """Let an engine that has nothing to do begin what waits at another."""
        self._note_silence()
        while (move := self._router.next_move()) is not None:
            self._abort_part(move.request_id)
            self._router.move(move)
            self._send(move.request_id, move.target)

    def _end(self, request: OpenRequest) -> None:
        """Forget a request, and end those of its parts that engines still have."""
        for part_id in request.parts:
            self._abort_part(part_id)
            self._router.remove(part_id)
            self._suspects.waiting.pop(part_id, None)
            del self._parts[part_id]
        request.parts.clear()
        self._open.pop(request.request_id, None)


def _is_abort(event: Event) -> bool:
    return isinstance(event, ErrorEvent) and isinstance(event.error, RequestAbortedError)
