"""An estimate of what an engine has cached, made from the requests that it was given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_parallm.types.work import LEAST_SHARED, RequestWork, StateCache

# CHUNK: tokens that are looked up together. A shorter prefix in common is worth no detour.
CHUNK = 32
# MAX_INPUTS: inputs whose results are cached, as far as they are remembered; some 100 bytes each.
MAX_INPUTS = 65_536


@dataclass(frozen=True, slots=True)
class WorkKeys:
    """The cache keys of a request: of what it may find, and of what it leaves for others.

    Two requests may have a key in common by accident. Then the choice of an engine is worse, and
    nothing else: engines compare the tokens themselves.

    Attributes:
        chunks: a key for each whole chunk of its prompt, which stands for all tokens up to its end.
        inputs: a key for each input whose result is kept, with its number of tokens.
        model: the first name of its model.
        turn: number of whole chunks before the latest turn; None if that is unknown.
        end: number of whole chunks with which the next turn begins; all, if that is unknown.
        whole: number of the first chunks that are of use together only.
    """

    chunks: list[int]
    inputs: list[tuple[int, int]]
    model: str = ""
    turn: int | None = None
    end: int = 0
    whole: int = 0


def keys_of(work: RequestWork) -> WorkKeys:
    """Return the keys of what a request may find."""
    chunks: list[int] = []
    root = key = hash(work.cache_key)
    for end in range(CHUNK, len(work.prefix) + 1, CHUNK):
        key = hash((key, tuple(work.prefix[end - CHUNK : end])))
        chunks.append(key)
    inputs = [(hash((root, each)), len(each)) for each in work.inputs]
    last = end = len(chunks)
    if work.answer_start is not None:
        end = min(last, work.answer_start // CHUNK)
    turn = None if work.turn_start is None else min(last, work.turn_start // CHUNK)
    return WorkKeys(chunks, inputs, work.model, turn, end, work.num_whole // CHUNK)


class CacheMirror:
    """The prompts and inputs that one engine was given last, as many as it caches.

    The engine evicts by its own rules, of which this is an estimate: least recently used first,
    without the blocks of generated tokens. Prefixes of a model with a state are found where blocks
    and state both are.
    """

    def __init__(
        self, capacity_tokens: int, states: Mapping[str, StateCache] | None = None
    ) -> None:
        """Begin with nothing.

        Args:
            capacity_tokens: tokens that the engine's KV pool holds.
            states: by the first names of models with a state, what is kept of these.
        """
        self._chunks = _LastUsed(capacity_tokens // CHUNK)
        self._inputs = _LastUsed(MAX_INPUTS)
        self._states = {
            name: _MirroredStates(cache, _LastUsed(cache.num_states))
            for name, cache in (states or {}).items()
        }

    def match(self, keys: WorkKeys) -> int:
        """Return how many tokens of a request the engine has computed."""
        count = self._num_found(keys) * CHUNK
        return count + sum(size for key, size in keys.inputs if key in self._inputs)

    def _num_found(self, keys: WorkKeys) -> int:
        """Return how many chunks of a prompt the engine finds."""
        states, num_blocks = self._states.get(keys.model), self._num_blocks(keys)
        return num_blocks if states is None else states.num_found(keys, num_blocks)

    def _num_blocks(self, keys: WorkKeys) -> int:
        """Return of how many chunks of a prompt the engine has the blocks."""
        count = 0
        while count < len(keys.chunks) and keys.chunks[count] in self._chunks:
            count += 1
        return count if count >= keys.whole else 0

    def missing(self, keys: WorkKeys) -> list[int]:
        """Return how many tokens of each input the engine has yet to compute."""
        return [0 if key in self._inputs else size for key, size in keys.inputs]

    def add(self, keys: WorkKeys) -> None:
        """Note that the engine computes a request."""
        if states := self._states.get(keys.model):
            states.add(keys, self._num_blocks(keys))
        # The last chunk is the oldest of its prompt: it is of use to fewer requests.
        for key in reversed(keys.chunks):
            self._chunks.use(key)
        for key, _ in keys.inputs:
            self._inputs.use(key)


class _LastUsed:
    """The keys that were used last."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def use(self, key: int, *, is_passing: bool = False) -> None:
        """Note a use of a key; one that ``is_passing`` is forgotten before all others."""
        if key not in self._keys and len(self._keys) >= self._capacity:
            if not self._capacity:
                return
            self._keys.popitem(last=False)
        self._keys[key] = None
        self._keys.move_to_end(key, last=not is_passing)


@dataclass(frozen=True, slots=True)
class _MirroredStates:
    """The prefixes whose states an engine keeps for one model."""

    cache: StateCache
    kept: _LastUsed

    def num_found(self, keys: WorkKeys, num_blocks: int) -> int:
        """Return how many chunks are found where ``num_blocks`` chunks have their blocks."""
        most = num_blocks if self.cache.needs_blocks else len(keys.chunks)
        return next((n for n in range(most, 0, -1) if keys.chunks[n - 1] in self.kept), 0)

    def add(self, keys: WorkKeys, num_blocks: int) -> None:
        """Note the states that the engine keeps of a prompt.

        Where no turn is known, that is where the prompt parts from earlier ones, of which the
        engine has ``num_blocks`` chunks.
        """
        num_found = self.num_found(keys, num_blocks)
        if num_found:
            self.kept.use(keys.chunks[num_found - 1])
        step = max(1, self.cache.interval // CHUNK)
        for place in range(num_found + step, len(keys.chunks), step):
            self.kept.use(keys.chunks[place - 1], is_passing=True)
        turn = keys.turn
        if turn is None:
            turn = num_blocks if num_blocks - num_found >= LEAST_SHARED // CHUNK else 0
        for place in (turn, keys.end):
            if place > num_found:
                self.kept.use(keys.chunks[place - 1])
