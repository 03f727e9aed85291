"""Prefixes in stores: which blocks and states they are to get, and what they have of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from mlx_parallm.generation.kv_cache.blocks import BlockPool, BlockTable
from mlx_parallm.generation.kv_cache.fetches import ChainFetch, Run
from mlx_parallm.generation.kv_cache.peer.prefill import Prompt
from mlx_parallm.generation.kv_cache.saves import Save
from mlx_parallm.generation.kv_cache.snapshots import StateSnapshots
from mlx_parallm.generation.kv_cache.tiers import ArrivedBlock, Tiers
from mlx_parallm.types.content import state_content


@dataclass(frozen=True, slots=True)
class StoredChain:
    """The part of a prefix that stores have, behind the one that memory has.

    Attributes:
        runs: the blocks.
        num_tokens: tokens that need not be computed then.
        state: the state after the last block, without which nothing of it is of use; None for
            models without a state.
    """

    runs: Sequence[Run]
    num_tokens: int
    state: Run | None = None

    @property
    def contents(self) -> list[bytes]:
        """The contents of the blocks."""
        return [content for run in self.runs for content in run.contents]

    @property
    def key(self) -> bytes:
        """A content that chains have in common which are read once for all."""
        return (self.runs[0] if self.state is None else self.state).contents[0]


class StoredChains:
    """The chains of a model in its stores: what they get, and have of a prompt.

    A model with a state uses a prefix only with the state after it: blocks may be in memory or in
    stores, but the state that counts is one in a store. A model without KV needs the state alone.
    """

    def __init__(
        self,
        tiers: Tiers,
        pool: BlockPool,
        block_size: int,
        *,
        snapshots: StateSnapshots | None,
        has_kv: bool,
    ) -> None:
        """See ``KVCacheManager``."""
        self._tiers = tiers
        self._pool = pool
        self._block_size = block_size
        self._snapshots = snapshots
        self._has_kv = has_kv

    def queue(self, table: BlockTable) -> None:
        """Have stores get what they lack of a table's cached blocks, if it is worth it.

        The snapshots after them follow. The latest one counts as used with its chain.
        """
        root, tiers = table.lasting_root, self._tiers
        if tiers.exports is not None:
            tiers.exports.note(table)
        # A source does not grow: what is worth reading is worth saving.
        least = tiers.min_fetched if table.is_source else tiers.min_saved
        if root is None or len(table.hashes) < least:
            return
        contents = [root + link for link in table.hashes]
        slots = self._snapshot_slots(table)
        latest = [state_content(root, table.hashes[count - 1]) for count in [*slots][-1:]]
        tiers.use([*contents, *latest] if self._has_kv else latest)
        num_saved = self._queue_blocks(table, contents) if self._has_kv else len(contents)
        for count, slot in slots.items():
            content = state_content(root, table.hashes[count - 1])
            if count <= num_saved and tiers.lacks(content):
                parent = contents[count - 1] if self._has_kv else b""
                save = Save(slot, content, parent, is_state=True, size=tiers.state_size)
                tiers.saves.add(save)

    def _snapshot_slots(self, table: BlockTable) -> dict[int, int]:
        """Return the slots of a chain's snapshots, by how many blocks are before them."""
        if self._snapshots is None:
            return {}
        first = self._tiers.min_saved
        slots = (
            (count, self._snapshots.find(table.root + link))
            for count, link in enumerate(table.hashes[first - 1 :], first)
        )
        return {count: slot for count, slot in slots if slot is not None}

    def _queue_blocks(self, table: BlockTable, contents: Sequence[bytes]) -> int:
        """Queue what stores lack of a chain; return how many blocks they have or get."""
        parent = b""
        for number, content in enumerate(contents):
            if self._tiers.lacks(content):
                block = self._pool.find(table.root + table.hashes[number])
                if block is None:
                    return number
                is_drafted = block in self._pool.drafted
                self._tiers.saves.add(Save(block, content, parent, is_drafted=is_drafted))
            parent = content
        return len(contents)

    def find(self, table: BlockTable, token_ids: Sequence[int]) -> StoredChain | None:
        """Return what stores have of the chain behind a table's; None if it is short.

        It ends as a cached prefix does, see ``KVCacheManager.new_table``.
        """
        size, root = self._block_size, table.lasting_root
        most = (len(token_ids) - 1) // size - len(table.hashes)
        if root is None or table.tail or most < self._tiers.min_fetched:
            return None
        links = self._links(table, token_ids)
        if self._has_kv:
            link = next(links)
            # Most prompts are new, as the first block says.
            if not (self._is_here(table, link) or self._tiers.find([root + link])):
                return None
            links = iter([link, *links])
        if self._snapshots is None:
            return self._find_blocks(table, root, list(links))
        return self._find_state(table, root, list(links))

    def elsewhere(
        self, table: BlockTable, token_ids: Sequence[int], chain: StoredChain | None, prompt: Prompt
    ) -> StoredChain | None:
        """Return the chain behind a table's that another server is to compute the rest of.

        Args:
            table: of the prompt.
            token_ids: the prompt, and no inputs besides.
            chain: what stores have.
            prompt: the same, as it is sent.

        Returns:
            None if the rest is short, or is to be computed here.
        """
        prefiller, root, size = self._tiers.prefiller, table.lasting_root, self._block_size
        num_runs = 0 if chain is None else len(chain.contents)
        num_before = len(table.hashes) + num_runs
        num_missing = (len(token_ids) - 1) // size - num_before
        if prefiller is None or root is None or num_missing * size < prefiller.min_tokens:
            return None
        store = prefiller.offer(prompt)
        if store is None:
            return None
        links = list(self._links(table, token_ids))[num_runs:]
        run = Run(store, [root + link for link in links])
        runs = (run,) if chain is None else (*chain.runs, run)
        return StoredChain(runs, (num_runs + len(links)) * size)

    def find_source(self, table: BlockTable, token_ids: Sequence[int]) -> StoredChain | None:
        """Return the chain of a source; None if it is short, or stores have not all of it."""
        root, size = table.lasting_root, self._block_size
        num_blocks = len(token_ids) // size
        if root is None or num_blocks < self._tiers.min_fetched:
            return None
        runs = self._tiers.find([root + link for link in self._links(table, token_ids)])
        if sum(len(run.contents) for run in runs) < num_blocks:
            return None
        return StoredChain(runs, num_blocks * size)

    def _is_here(self, table: BlockTable, link: bytes) -> bool:
        """True if memory has a block of use, which no snapshot follows."""
        return self._snapshots is not None and self._pool.find(table.root + link) is not None

    def _links(self, table: BlockTable, token_ids: Sequence[int]) -> Iterator[bytes]:
        """Return the hashes of the blocks behind a table's; one token is left to compute."""
        size = self._block_size
        return table.links(token_ids, len(token_ids) - size, size)

    def _find_blocks(
        self, table: BlockTable, root: bytes, links: Sequence[bytes]
    ) -> StoredChain | None:
        first, contents = len(table.hashes), [root + link for link in links]
        self._tiers.use([root + link for link in table.hashes])
        runs = self._tiers.find(contents)
        num_found = sum(len(run.contents) for run in runs)
        num_whole = table.count_whole(first + num_found, self._block_size) - first
        if num_whole < self._tiers.min_fetched:
            return None
        if num_whole < num_found:
            runs = self._tiers.find(contents[:num_whole])
        return StoredChain(runs, num_whole * self._block_size)

    def _find_state(
        self, table: BlockTable, root: bytes, links: Sequence[bytes]
    ) -> StoredChain | None:
        """Return the longest prefix of which memory and stores have all blocks, and a state."""
        num_here, contents = self._count_here(table, links), [root + link for link in links]
        runs = self._tiers.find(contents[num_here:])
        num_found = num_here + sum(len(run.contents) for run in runs)
        first = len(table.hashes)
        for count in range(num_found, self._tiers.min_fetched - 1, -1):
            if table.count_whole(first + count, self._block_size) < first + count:
                continue
            state = self._tiers.find_state(state_content(root, links[count - 1]))
            if state is not None:
                self._tiers.use([root + link for link in table.hashes])
                runs = self._tiers.find(contents[num_here:count])
                return StoredChain(runs, count * self._block_size, state)
        return None

    def _count_here(self, table: BlockTable, links: Sequence[bytes]) -> int:
        """Return how many leading blocks need no store: memory has them, or there are none."""
        if not self._has_kv:
            return len(links)
        here = takewhile(lambda link: self._pool.find(table.root + link) is not None, links)
        return len(list(here))

    def claim(
        self,
        table: BlockTable,
        token_ids: Sequence[int],
        fetch: ChainFetch,
        arrived: Sequence[ArrivedBlock],
    ) -> tuple[list[int | None], Sequence[ArrivedBlock]]:
        """Return what continues a table: blocks of memory, then what was read for its sequence.

        None stands for a block that only counts tokens. Others may have computed blocks meanwhile,
        or have evicted what they follow. Then, as after a change of the weights, what was read is
        of no use.
        """
        root = table.lasting_root
        if root is None or not arrived or len(table.blocks) > len(table.hashes):
            return [], ()
        links = self._links(table, token_ids)
        if fetch.state is None:
            return [], self._blocks_behind(table, root, list(links), fetch, arrived)
        before: list[bytes] = []
        for link in links:
            before.append(link)
            if state_content(root, link) == fetch.state.contents[0]:
                return self._with_state(table, root, before, fetch, arrived)
        return [], ()

    def _blocks_behind(
        self,
        table: BlockTable,
        root: bytes,
        links: Sequence[bytes],
        fetch: ChainFetch,
        arrived: Sequence[ArrivedBlock],
    ) -> Sequence[ArrivedBlock]:
        """Return what was read of the blocks behind a table's, as far as it may be used."""
        contents, first = fetch.contents, len(table.blocks)
        if not links or root + links[0] not in contents:
            return ()
        following = arrived[contents.index(root + links[0]) :][: len(links)]
        num_whole = table.count_whole(first + len(following), self._block_size)
        return following[: num_whole - first]

    def _with_state(
        self,
        table: BlockTable,
        root: bytes,
        links: Sequence[bytes],
        fetch: ChainFetch,
        arrived: Sequence[ArrivedBlock],
    ) -> tuple[list[int | None], Sequence[ArrivedBlock]]:
        """Return blocks of memory, the others, and the state after them all; nothing without it."""
        num_here, contents = self._count_here(table, links), fetch.contents
        missing = [root + link for link in links[num_here:]]
        if contents[len(contents) - len(missing) :] != missing:
            return [], ()
        here = [self._pool.find(table.root + link) for link in links[:num_here]]
        *blocks, state = arrived
        state = replace(state, prefix=table.root + links[-1])
        return here, [*blocks[len(blocks) - len(missing) :], state]
