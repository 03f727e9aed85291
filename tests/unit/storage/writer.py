"""A process that puts records into a database until it is killed, and prints each one's number.

Usage: python -m tests.unit.storage.writer PATH
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.storage.database import Connection, Database, Schema, put

# SIZE: more than a page, so that a transaction writes several.
SIZE = 6_000


@dataclass(frozen=True)
class Pair:
    """Two of them make a transaction."""

    id: str
    text: str


SCHEMA = Schema(
    1, ["CREATE TABLE things (id TEXT PRIMARY KEY, record TEXT NOT NULL)"], {"things": Pair}
)


def put_pair(db: Connection, number: int) -> None:
    """Put both halves."""
    for half in "ab":
        put(db, "things", Pair(f"{number:05}{half}", half * SIZE))


def main(path: str) -> None:
    """Write without end."""
    database = Database(Path(path), SCHEMA)
    for number in itertools.count():
        database.run_now(lambda db, number=number: put_pair(db, number))
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
