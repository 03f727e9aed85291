"""Write chains to a folder until the end, and print the number of each that is written.

python -m tests.kv_disk_writer FOLDER NAME LIMIT_BYTES
"""

import sys
from itertools import count
from pathlib import Path

from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.generation.kv_cache.stores import StoredBlock
from tests.kv_disk import OWNER, chain

NUM_BLOCKS = 10
BLOCK_BYTES = 20_000


def chain_of(name: str, number: int) -> list[StoredBlock]:
    return chain((name, number), NUM_BLOCKS, BLOCK_BYTES)


def main() -> None:
    _, folder, name, limit_bytes = sys.argv
    store = DiskStore(Path(folder), OWNER, int(limit_bytes))
    for number in count():
        for block in chain_of(name, number):
            store.put(block)
        store.flush()
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
