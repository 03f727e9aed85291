"""An estimate of what an engine has cached, made from the requests that it was given."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from mlx_parallm.types.work import RequestWork

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
    """

    chunks: list[int]
    inputs: list[tuple[int, int]]


def keys_of(work: RequestWork) -> WorkKeys:
    """Return the keys of what a request may find."""
    chunks: list[int] = []
    root = key = hash(work.cache_key)
    for end in range(CHUNK, len(work.prefix) + 1, CHUNK):
        key = hash((key, tuple(work.prefix[end - CHUNK : end])))
        chunks.append(key)
    return WorkKeys(chunks, [(hash((root, each)), len(each)) for each in work.inputs])


class CacheMirror:
    """The prompts and inputs that one engine was given last, as many as it caches.

    The engine evicts by its own rules, of which this is an estimate: least recently used first,
    without the blocks of generated tokens.
    """

    def __init__(self, capacity_tokens: int) -> None:
        """``capacity_tokens``: tokens that the engine's KV pool holds."""
        self._chunks = _LastUsed(capacity_tokens // CHUNK)
        self._inputs = _LastUsed(MAX_INPUTS)

    def match(self, keys: WorkKeys) -> int:
        """Return how many tokens of a request the engine has computed."""
        count = 0
        while count < len(keys.chunks) and keys.chunks[count] in self._chunks:
            count += 1
        return count * CHUNK + sum(size for key, size in keys.inputs if key in self._inputs)

    def missing(self, keys: WorkKeys) -> list[int]:
        """Return how many tokens of each input the engine has yet to compute."""
        return [0 if key in self._inputs else size for key, size in keys.inputs]

    def add(self, keys: WorkKeys) -> None:
        """Note that the engine computes a request."""
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

    def use(self, key: int) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)
