"""Processes that write KV to a folder and are killed: nothing half is read, and the limit holds."""

import signal
import subprocess
from pathlib import Path

from mlx_parallm.generation.kv_cache.disk.folder import locked
from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.peers.child_process import ChildProcess
from tests.kv_disk import OWNER, contents, data
from tests.kv_disk_writer import NUM_BLOCKS, chain_of
from tests.unit.generation.kv_cache.store_suite import read

LIMIT_BYTES = 3_000_000
NUM_KILLS = 3
#: Chains that each process has written before it is killed: more than there is room for.
NUM_WRITTEN = 12


def num_bytes(folder: Path) -> int:
    """Return the bytes of all files, half ones too, while no process changes them."""
    with locked(folder):
        return sum(path.stat().st_size for path in folder.glob("*/*"))


def start(folder: Path, name: str) -> ChildProcess:
    return ChildProcess(
        ["tests.kv_disk_writer", str(folder), name, str(LIMIT_BYTES)],
        stdout=subprocess.PIPE,
        text=True,
    )


def kill(child: ChildProcess) -> int:
    """Kill a process; return the number of the last chain that it has written."""
    child.kill()
    child.wait()
    assert child.stdout is not None
    lines = [line for line in child.stdout if line.endswith("\n")]
    child.stdout.close()
    return int(lines[-1]) if lines else NUM_WRITTEN - 1


def test_processes_that_are_killed_while_they_write(tmp_path: Path):
    folder = tmp_path / "kv"
    folder.mkdir()
    for number in range(NUM_KILLS):
        children = {name: start(folder, name) for name in (f"a{number}", f"b{number}")}
        for child in children.values():
            assert child.stdout is not None
            for _ in range(NUM_WRITTEN):
                child.stdout.readline()
            assert num_bytes(folder) <= LIMIT_BYTES
        # None may evict what another has written before it was killed.
        for child in children.values():
            child.send_signal(signal.SIGSTOP)
        written = {name: kill(child) for name, child in children.items()}
        store = DiskStore(folder, OWNER, LIMIT_BYTES)
        assert num_bytes(folder) <= LIMIT_BYTES
        assert not list(folder.glob("*/*.part"))
        for name, last in written.items():
            assert store.find(contents(chain_of(name, last))) == NUM_BLOCKS
            for each in range(last + 1):
                blocks = chain_of(name, each)
                num = store.find(contents(blocks))
                assert read(store, contents(blocks)) == data(blocks)[:num]
        assert not store.stats.discarded
        store.close()
