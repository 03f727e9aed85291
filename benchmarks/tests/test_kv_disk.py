"""Files and streams are counted as ``benchmarks.kv_disk`` says."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from benchmarks.kv_disk_load import RECURRING, StreamRun, Watch, traffic
from mlx_parallm.bench.record import RequestRecord
from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.generation.kv_cache.stores import StoredBlock

DATA_BYTES, LIMIT_BYTES = 4096, 1_000_000


def put(store: DiskStore, *contents: bytes) -> None:
    """Have a chain written, in a file of its own."""
    parent = b""
    for content in contents:
        store.put(StoredBlock(content=content, parent=parent, data=bytes(DATA_BYTES)))
        parent = content
    store.close()


def test_files_are_counted_for_each_of_their_blocks_also_once_they_are_gone(tmp_path: Path) -> None:
    first, second, other = (bytes([number]) * 32 for number in (1, 2, 3))
    watch = Watch(tmp_path)
    for contents in ((first, second), (other,), (first,)):
        put(DiskStore(tmp_path, "ab", LIMIT_BYTES, has_threads=False), *contents)
        watch.look()
        watch.look()
        for path in tmp_path.rglob("*.kv*"):
            path.unlink()

    assert watch.writes == {first: 2, second: 1, other: 1}
    assert watch.num_files == 3
    assert 2 * DATA_BYTES < watch.most_bytes <= LIMIT_BYTES


def test_every_other_request_recurs_and_the_others_never_do() -> None:
    prompts = [tuple(each.body["prompt"]) for each in islice(traffic(), 4 * RECURRING)]

    assert prompts[0::2] == 2 * prompts[0 : 2 * RECURRING : 2]
    assert len(set(prompts[1::2])) == 2 * RECURRING
    assert not set(prompts[0::2]) & set(prompts[1::2])


def test_a_pause_is_seen_in_each_window_that_it_overlaps() -> None:
    run = StreamRun([RequestRecord(index=0, start_s=0.0, chunk_times_s=[0.0, 1.0, 5.0, 6.0])])
    for window in ((0.2, 0.5), (2.0, 3.0), (4.5, 5.5)):
        run.note("beside", *window)

    assert run.gaps_ms("beside") == [[1000.0], [4000.0], [4000.0, 1000.0]]
    assert run.pause_ms("beside") == 2500.0
