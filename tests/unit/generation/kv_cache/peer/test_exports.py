"""Answers to other servers: blocks of stores and of the pool, between steps."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence

import pytest

from mlx_parallm.generation.kv_cache.host_store import HostStore
from mlx_parallm.generation.kv_cache.peer import exports as exports_module
from mlx_parallm.generation.kv_cache.peer.exports import Exports
from mlx_parallm.generation.kv_cache.peer.filters import UID_BYTES, ContentFilter
from mlx_parallm.generation.kv_cache.stores import BlockStore
from mlx_parallm.peers.channel import pack
from tests.dict_store import DictStore
from tests.kv_disk import chain
from tests.kv_peers import OWNER
from tests.scheduler_harness import SchedulerHarness
from tests.stored_prompts import NUM_FOUND, OTHER, PROMPT, ask, fill_store, num_computed


class Server:
    """A scheduler whose blocks others may ask for."""

    def __init__(self, *stores: BlockStore, num_blocks: int = 40, runs_ahead: bool = False) -> None:
        self.exports = Exports(OWNER, 100, clock=lambda: self.harness.now_s)
        self.harness = SchedulerHarness(
            num_blocks=num_blocks, stores=stores, exports=self.exports, runs_ahead=runs_ahead
        )
        assert self.harness.tiers is not None
        self.tiers = self.harness.tiers

    def turn(self, **faults: object) -> None:
        """Take a turn as the engine does."""
        self.tiers.answer_peers()
        self.harness.step(**faults)  # type: ignore[arg-type]
        self.tiers.answer_peers()

    def read(self, contents: Sequence[bytes], **faults: object) -> list[bytes]:
        answer = self.exports.ask(contents)
        while not answer.done():
            assert self.tiers.has_asked
            self.turn(**faults)
        assert not self.exports._open
        return [bytes(block) for block in answer.result()]


@pytest.fixture
def kept() -> dict[bytes, bytes]:
    """Return the blocks of ``PROMPT`` by their contents, in order."""
    store = DictStore()
    fill_store(store)
    return {content: bytes(data) for content, data in store.blocks.items()}


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_blocks_of_the_pool_are_read_for_others(kept: dict[bytes, bytes], runs_ahead: bool) -> None:
    server = Server(runs_ahead=runs_ahead)
    ask(server.harness, "first")
    server.harness.drain()
    assert server.read([*kept, b"x" * 32]) == list(kept.values())
    assert not server.tiers.has_asked
    # Reading them leaves nothing behind.
    server.harness.drain()
    ask(server.harness, "again")
    server.harness.drain()
    assert server.read(list(kept)) == list(kept.values())


def test_blocks_can_be_sent_to_another_process(kept: dict[bytes, bytes]) -> None:
    store = DictStore()
    fill_store(store)
    # The device's blocks are views, which cannot be pickled as they are.
    store.blocks.update({content: memoryview(data) for content, data in store.blocks.items()})
    server = Server(store)
    answer = server.exports.ask(list(kept))
    server.turn()
    # Garbage collection crashes on cycles with a PickleBuffer of a memoryview.
    assert not any(isinstance(each, pickle.PickleBuffer) for each in answer.result())
    sent = pack(answer.result())
    assert len(sent.body) < 1000
    came = pickle.loads(sent.body, buffers=sent.buffers)
    assert [bytes(each) for each in came] == list(kept.values())


def test_blocks_of_stores_are_not_read_from_the_device(kept: dict[bytes, bytes]) -> None:
    store = DictStore()
    fill_store(store)
    server = Server(store)
    assert server.read(list(kept)) == list(kept.values())
    assert not server.harness.batches


def test_a_chain_may_be_in_a_store_in_part(kept: dict[bytes, bytes]) -> None:
    store = DictStore()
    server = Server(store)
    ask(server.harness, "first")
    server.harness.drain()
    for content in list(kept)[2:]:
        del store.blocks[content]
    assert server.read(list(kept)) == list(kept.values())
    # A store gets nothing that only others have asked for.
    assert list(store.blocks) == list(kept)[:2]


def test_a_store_that_reads_is_awaited(kept: dict[bytes, bytes]) -> None:
    store = DictStore(holds_back=True)
    fill_store(store)
    server = Server(store)
    answer = server.exports.ask(list(kept))
    server.turn()
    assert not server.tiers.has_asked
    assert not answer.done()
    store.complete()
    assert server.tiers.has_asked
    server.turn()
    assert list(map(bytes, answer.result())) == list(kept.values())


def test_streams_go_on_while_others_read(kept: dict[bytes, bytes]) -> None:
    server = Server()
    ask(server.harness, "first")
    server.harness.drain()
    ask(server.harness, "stream", OTHER, max_tokens=30)
    server.harness.step()
    answer = server.exports.ask(list(kept))
    before = num_computed(server.harness)
    while not answer.done():
        server.turn()
    assert num_computed(server.harness) > before
    assert list(map(bytes, answer.result())) == list(kept.values())
    server.harness.drain()


def test_a_step_that_fails_gives_no_block(kept: dict[bytes, bytes]) -> None:
    server = Server()
    ask(server.harness, "first")
    server.harness.drain()
    assert server.read(list(kept), raises=True) == []
    server.harness.drain()


def test_a_reset_gives_no_block(kept: dict[bytes, bytes]) -> None:
    server = Server()
    ask(server.harness, "first")
    server.harness.drain()
    answer = server.exports.ask(list(kept))
    server.tiers.answer_peers()
    server.harness.scheduler.reset_prefix_cache(reset_running=False)
    server.turn()
    assert answer.result() == []
    assert server.read(list(kept)) == []


def test_other_weights_and_scopes_are_not_found(kept: dict[bytes, bytes]) -> None:
    server = Server()
    ask(server.harness, "first", salt="a tenant's")
    server.harness.drain()
    assert server.read(list(kept)) == []
    assert not any(content in kept for content in server.exports.contents())


def test_blocks_are_read_before_they_are_evicted(kept: dict[bytes, bytes]) -> None:
    server = Server(num_blocks=NUM_FOUND + 3)
    ask(server.harness, "first")
    server.harness.drain()
    answer = server.exports.ask(list(kept))
    server.tiers.answer_peers()
    ask(server.harness, "second", OTHER, max_tokens=4)
    while not answer.done():
        server.turn()
    assert list(map(bytes, answer.result())) == list(kept.values())
    server.harness.drain()


def test_who_needs_no_filter_any_more_takes_it_from_nobody(kept: dict[bytes, bytes]) -> None:
    store = DictStore()
    fill_store(store)
    server, may_read = Server(store), threading.Event()
    contents = server.exports.contents

    def wait_and_read(most: float) -> list[bytes]:
        may_read.wait()
        return contents(most)

    server.exports.contents = wait_and_read  # type: ignore[method-assign]
    first, second = server.exports.filter(), server.exports.filter()
    first.cancel()
    may_read.set()
    assert second.result()[:UID_BYTES] == server.exports.uid
    assert server.exports.filter().result() == second.result()


def test_a_filter_has_the_latest_blocks(
    kept: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = Server()
    ask(server.harness, "first")
    server.harness.drain()
    ask(server.harness, "second", OTHER)
    server.harness.drain()
    num_all = len(server.exports.contents())
    monkeypatch.setattr(exports_module, "MAX_CONTENTS", num_all - len(kept))
    for _ in range(2):
        bits = server.exports.filter().result()[UID_BYTES:]
        server.harness.now_s += 10
        # Those of the first prompt are evicted first.
        assert not any(content in ContentFilter(bits) for content in kept)
        assert ContentFilter(bits).size == num_all - len(kept)
    assert len(caplog.records) == 1


def test_the_latest_contents_of_a_store_come_first() -> None:
    store = HostStore(1000)
    blocks = chain("a", 3, 100)
    others = chain("b", 3, 100)
    for block in (*blocks, *others):
        store.put(block)
    store.use([block.content for block in blocks])
    assert set(store.contents()) == {block.content for block in (*blocks, *others)}
    assert store.contents(2) == [block.content for block in blocks[:2]]


def test_a_question_that_is_withdrawn_is_forgotten(kept: dict[bytes, bytes]) -> None:
    store = DictStore(holds_back=True)
    fill_store(store)
    server = Server(store)
    answer = server.exports.ask(list(kept))
    server.turn()
    answer.cancel()
    assert server.tiers.has_asked
    server.turn()
    assert not server.exports._open


def test_what_never_comes_is_not_awaited_for_ever(kept: dict[bytes, bytes]) -> None:
    store = DictStore(holds_back=True)
    fill_store(store)
    server = Server(store)
    answers = [server.exports.ask(list(kept)), server.exports.ask([b"x" * 32], waits=True)]
    server.turn()
    assert not server.tiers.has_asked
    server.harness.now_s += exports_module.ANSWER_S + 1
    assert server.tiers.has_asked
    server.turn()
    assert [answer.result() for answer in answers] == [[], []]
    assert not server.exports._open


def test_an_answer_is_bounded(kept: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports_module, "MAX_BYTES", 300)
    server = Server()
    ask(server.harness, "first")
    server.harness.drain()
    assert server.read(list(kept)) == list(kept.values())[:3]


def test_awaited_blocks_come_once_they_are_computed(kept: dict[bytes, bytes]) -> None:
    server = Server()
    answer = server.exports.ask(list(kept), waits=True)
    server.turn()
    assert not server.tiers.has_asked
    ask(server.harness, "first", max_tokens=8)
    while not answer.done():
        server.turn()
    first = [bytes(block) for block in answer.result()]
    assert first
    assert first == list(kept.values())[: len(first)]
    assert "first" in server.harness.tracked
    server.harness.drain()


def test_the_filter_has_what_is_here(kept: dict[bytes, bytes]) -> None:
    store = HostStore(1 << 20)
    server = Server(store)
    ask(server.harness, "first")
    server.harness.drain()
    answer = server.exports.filter().result()
    assert answer[:UID_BYTES] == server.exports.uid
    there = ContentFilter(answer[UID_BYTES:])
    assert all(content in there for content in kept)
    assert b"x" * 32 not in there
    assert set(kept) <= set(server.exports.contents())


def test_roots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports_module, "MAX_ROOTS", 3)
    server = Server()
    for number in range(5):
        ask(server.harness, str(number), PROMPT, salt=str(number))
        server.harness.drain()
    assert len(server.exports._roots) == 3
