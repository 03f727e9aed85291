"""A model of engines in parallel: steps, queues and prefix caches, without a clock or a model."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.types.work import LEAST_SHARED, Ends, RequestWork, StateCache

# BLOCK: tokens of a block of the simulated prefix cache.
BLOCK = 16
# MODEL: the name of the model.
MODEL = "model"
MAX_STEPS = 200_000


@dataclass(slots=True)
class SimRequest:
    """A request, and what became of it; steps are counted from 0.

    Attributes:
        name: its id.
        prompt: its tokens.
        outputs: the length of each sample.
        client: whose it is.
        on_end: called when it has ended, with the step.
        divides: False if one engine must have all of it.
        turn_start: see ``RequestWork``.
        arrived_at: the step in which it came.
        cached: tokens of the prompt that were not computed; negative if engines that share it
            computed more than one prompt.
        ended_at: the step that ended it; None while it runs.
    """

    name: str
    prompt: tuple[int, ...]
    outputs: tuple[int, ...] = (16,)
    client: str = ""
    on_end: Callable[[int], None] = lambda _step: None
    divides: bool = True
    turn_start: int | None = None
    arrived_at: int = 0
    cached: int = 0
    ended_at: int | None = None

    @property
    def work(self) -> RequestWork:
        """Return its size, for the router."""
        return RequestWork(
            num_tokens=len(self.prompt),
            num_samples=len(self.outputs),
            max_output=None,
            client=self.client,
            prefix=self.prompt,
            turn_start=self.turn_start,
            model=MODEL,
            is_divisible=self.divides and len(self.outputs) > 1,
        )


@dataclass(slots=True)
class _Running:
    request: SimRequest
    left: int
    is_computed: bool = False
    outputs: list[int] = field(default_factory=list[int])


class SimEngine:
    """One engine: at most so many samples and rows a step, and blocks of which the oldest go.

    With ``num_states`` its model has a state, of which it keeps so many after prefixes.
    """

    def __init__(
        self, *, max_num_seqs: int, rows: int, num_blocks: int, num_states: int | None = None
    ) -> None:
        self._num_states = num_states
        self._states: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._max_num_seqs = max_num_seqs
        self._rows = rows
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._queues: dict[str, deque[SimRequest]] = {}
        self._running: dict[str, _Running] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return sum(map(len, self._queues.values()))

    @property
    def is_full(self) -> bool:
        """True if a request waits for samples of others to end."""
        queued = [queue[0] for queue in self._queues.values() if queue]
        room = self._max_num_seqs - self._num_open
        return bool(self._running) and any(len(request.outputs) > room for request in queued)

    @property
    def num_rows(self) -> int:
        """Rows of a step."""
        return self._rows

    @property
    def _num_open(self) -> int:
        return sum(len(running.outputs) for running in self._running.values())

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do."""
        return not self._running and not self.num_waiting

    def rows_until(self, request: SimRequest) -> int:
        """Return the rows to compute before the prompt of a request that waits is computed.

        Those of other clients that wait are left out, because clients take turns. A prompt finds
        what those before it have computed.
        """
        computing = [running for running in self._running.values() if not running.is_computed]
        rows = sum(running.left for running in computing)
        before = {block for running in computing for block in _blocks(running.request.prompt)}
        for queued in self._queues[request.client]:
            rows += self.own_rows(queued, before)
            before |= set(_blocks(queued.prompt))
            if queued is request:
                return rows
        raise AssertionError(request)

    def own_rows(self, request: SimRequest, before: Collection[tuple[int, ...]] = ()) -> int:
        """Return how many tokens of a prompt it would have to compute after some blocks."""
        prompt = request.prompt
        known = takewhile(lambda block: block in self._blocks or block in before, _blocks(prompt))
        cached = sum(BLOCK for _ in known)
        return len(prompt) - min(cached, len(prompt) - 1)

    @property
    def waiting(self) -> list[SimRequest]:
        """Requests that have not begun."""
        return [request for queue in self._queues.values() for request in queue]

    def submit(self, request: SimRequest) -> None:
        """Queue a request."""
        self._queues.setdefault(request.client, deque()).append(request)

    def abort(self, name: str) -> None:
        """Forget a request."""
        self._running.pop(name, None)
        for queue in self._queues.values():
            for request in [request for request in queue if request.name == name]:
                queue.remove(request)

    def step(self) -> list[tuple[str, int, Ends]]:
        """Compute one step; return the events, ``(request, tokens, what ends)``."""
        rows, events = self._rows, list[tuple[str, int, Ends]]()
        for running in [running for running in self._running.values() if running.is_computed]:
            rows -= len(running.outputs)
            events += self._decode(running)
        computing = deque(each for each in self._running.values() if not each.is_computed)
        while rows > 0:
            running = computing.popleft() if computing else self._begin()
            if running is None:
                break
            count = min(rows, running.left)
            rows -= count
            running.left -= count
            if not running.left:
                running.is_computed = True
                self._keep(running.request.prompt)
                self._keep_states(running.request)
                events.append((running.request.name, 0, Ends.NOTHING))
        return events

    def _begin(self) -> _Running | None:
        """Return the next request if there is room for it; clients take turns."""
        client = next((client for client, queue in self._queues.items() if queue), None)
        if client is None:
            return None
        request = self._queues[client][0]
        if self._running and self._num_open + len(request.outputs) > self._max_num_seqs:
            return None
        self._queues[client].popleft()
        self._queues[client] = self._queues.pop(client)
        num_matched, num_found = self._match(request.prompt)
        if request.turn_start is None:
            request.turn_start = num_matched if num_matched - num_found >= LEAST_SHARED else 0
        request.cached = min(num_found, len(request.prompt) - 1)
        left = len(request.prompt) - request.cached
        running = _Running(request, left, outputs=list(request.outputs))
        self._running[request.name] = running
        return running

    def _decode(self, running: _Running) -> list[tuple[str, int, Ends]]:
        name = running.request.name
        ended = sum(left == 1 for left in running.outputs)
        events = [(name, len(running.outputs) - ended, Ends.NOTHING)]
        events += [(name, 1, Ends.SAMPLE)] * ended
        running.outputs = [left - 1 for left in running.outputs if left > 1]
        if not running.outputs:
            del self._running[name]
        return events

    def _match(self, prompt: tuple[int, ...]) -> tuple[int, int]:
        """Return how many tokens of a prompt have blocks, and how many are found."""
        count = 0
        while (end := (count + 1) * BLOCK) <= len(prompt) and prompt[:end] in self._blocks:
            self._blocks.move_to_end(prompt[:end])
            count += 1
        if self._num_states is None:
            return count * BLOCK, count * BLOCK
        ends = range(count * BLOCK, 0, -BLOCK)
        end = next((end for end in ends if prompt[:end] in self._states), 0)
        if end:
            self._states.move_to_end(prompt[:end])
        return count * BLOCK, end

    def _keep(self, prompt: tuple[int, ...]) -> None:
        for end in range(len(prompt) // BLOCK * BLOCK, 0, -BLOCK):
            self._blocks[prompt[:end]] = None
            self._blocks.move_to_end(prompt[:end])
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)

    def _keep_states(self, request: SimRequest) -> None:
        for end in (request.turn_start or 0, len(request.prompt) - 1):
            if prefix := request.prompt[: end // BLOCK * BLOCK]:
                self._states[prefix] = None
                self._states.move_to_end(prefix)
        while len(self._states) > (self._num_states or 0):
            self._states.popitem(last=False)


def _blocks(prompt: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the prefixes of a prompt that end with a block."""
    return [prompt[:end] for end in range(BLOCK, len(prompt) + 1, BLOCK)]


class SimFleet:
    """Engines and a router before them.

    Attributes:
        requests: all that were submitted.
        idle_steps: steps in which an engine had nothing to do for the second time in a row while
            a request waited at another for places, or for prompts that are longer than its own.
        moves: requests that were moved.
    """

    def __init__(
        self,
        num_engines: int,
        *,
        num_blocks: int,
        max_num_seqs: int = 32,
        rows: int = 256,
        num_states: int | None = None,
    ) -> None:
        """``num_blocks``, ``max_num_seqs``, ``rows`` and ``num_states`` are of each engine."""
        self.engines = [
            SimEngine(
                max_num_seqs=max_num_seqs, rows=rows, num_blocks=num_blocks, num_states=num_states
            )
            for _ in range(num_engines)
        ]
        self.router = Router(
            num_engines, max_num_seqs=max_num_seqs, cache_tokens=num_blocks * BLOCK
        )
        if num_states is not None:
            states = StateCache(num_states=num_states, interval=MAX_STEPS)
            self.router.set_cache(num_blocks * BLOCK, {MODEL: states})
        self.requests: dict[str, SimRequest] = {}
        self.idle_steps = 0
        self.moves = 0
        self._step = 0
        self._was_idle = [False] * num_engines
        # The parts of all requests by their names, and whose they are.
        self._parts: dict[str, SimRequest] = {}
        self._wholes: dict[str, SimRequest] = {}
        self._open_parts: Counter[str] = Counter()

    def submit(self, request: SimRequest) -> None:
        """Give a request to the engine that the router chooses, or parts of it to several."""
        self.requests[request.name] = request
        request.arrived_at, request.cached = self._step, len(request.prompt)
        shares = self.router.divide(request.work)
        self._open_parts[request.name] = len(shares)
        for share in shares:
            name = f"{request.name}/{share.first}"
            outputs = request.outputs[share.first : share.first + share.count]
            part = SimRequest(
                name,
                request.prompt,
                outputs,
                request.client,
                divides=False,
                turn_start=request.turn_start,
            )
            self._parts[name], self._wholes[name] = part, request
            self.router.put(name, part.work, share.rank)
            self.engines[share.rank].submit(part)

    def run(self, arrivals: Iterable[tuple[int, SimRequest]] = ()) -> None:
        """Compute steps until every request has ended; ``arrivals`` have their steps, in order."""
        coming = deque(arrivals)
        while coming or not all(engine.is_idle for engine in self.engines):
            while coming and coming[0][0] <= self._step:
                self.submit(coming.popleft()[1])
            self.step()
            assert self._step < MAX_STEPS, "the simulation does not end"

    def step(self) -> None:
        """Move what could begin elsewhere, and let every engine compute one step."""
        while (move := self.router.next_move()) is not None:
            self.moves += 1
            self.engines[move.source].abort(move.request_id)
            self.engines[move.target].submit(self._parts[move.request_id])
            self.router.move(move)
        self._count_idle()
        for rank, engine in enumerate(self.engines):
            for name, num_tokens, ends in engine.step():
                self.router.on_event(name, rank, num_tokens, ends)
                self._end(name)
        self._step += 1

    @property
    def hit_rate(self) -> float:
        """The share of all prompt tokens that were found in a cache."""
        requests = self.requests.values()
        return sum(each.cached for each in requests) / sum(len(each.prompt) for each in requests)

    @property
    def num_steps(self) -> int:
        """Steps until now."""
        return self._step

    def _end(self, name: str) -> None:
        part, request = self._parts[name], self._wholes[name]
        if name in self.router.placements or part.ended_at is not None:
            return
        part.ended_at = self._step
        request.cached += part.cached - len(part.prompt)
        self._open_parts[request.name] -= 1
        if not self._open_parts[request.name]:
            request.ended_at = self._step
            request.on_end(self._step)

    def _count_idle(self) -> None:
        for rank, engine in enumerate(self.engines):
            if engine.is_idle and self._was_idle[rank]:
                self.idle_steps += any(self._would_gain(other, engine) for other in self.engines)
            self._was_idle[rank] = engine.is_idle

    def _would_gain(self, engine: SimEngine, idle: SimEngine) -> bool:
        """True if a request that waits at an engine would begin a step sooner at an idle one."""
        if engine.is_full:
            return True
        slack = idle.num_rows
        return any(
            engine.rows_until(request) > idle.own_rows(request) + slack
            for request in engine.waiting
        )


def tokens(seed: int, count: int) -> tuple[int, ...]:
    """Return tokens that no other seed has."""
    return tuple(range(seed * 100_000, seed * 100_000 + count))


def one_big(fleet: SimFleet, num_blocks: int, max_num_seqs: int, rows: int) -> SimFleet:
    """Return one engine that has what all engines of a fleet have together."""
    count = len(fleet.engines)
    return SimFleet(
        1, num_blocks=num_blocks * count, max_num_seqs=max_num_seqs * count, rows=rows * count
    )


def chats(
    fleet: SimFleet,
    num_chats: int,
    num_turns: int,
    *,
    turn_tokens: int = 96,
    system: tuple[int, ...] = (),
) -> None:
    """Submit conversations: each turn's prompt has all before it, and comes when that has ended."""

    def next_turn(chat: int, turn: int, history: Sequence[int]) -> None:
        prompt = (*history, *tokens(1 + chat * num_turns + turn, turn_tokens))

        def on_end(_step: int) -> None:
            if turn + 1 < num_turns:
                next_turn(chat, turn + 1, prompt)

        fleet.submit(
            SimRequest(
                f"{chat}-{turn}",
                prompt,
                on_end=on_end,
                client=f"chat {chat}",
                turn_start=len(history),
            )
        )

    for chat in range(num_chats):
        next_turn(chat, 0, system)
