"""Data folders of batches in their former layout, and what is found in a folder."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mlx_parallm.batch_jobs.files import FileLimits
from mlx_parallm.batch_jobs.journal import Entry, Journal
from mlx_parallm.batch_jobs.records import BatchRecord, FileRecord, State
from mlx_parallm.batch_jobs.storage import Storage
from mlx_parallm.storage.ids import IdMaker

LIMITS = FileLimits(max_file_bytes=10_000, max_total_bytes=2**20)
IDS = IdMaker()


def a_file(owner: str = "", purpose: str = "batch", expires_at: int | None = None) -> FileRecord:
    return FileRecord(
        id=IDS.make("file-"), owner=owner, filename="größe \ud800.jsonl", purpose=purpose,
        num_bytes=7, created_at=1_700_000_000, expires_at=expires_at,
    )  # fmt: skip


def a_batch(file: FileRecord, status: State) -> BatchRecord:
    return BatchRecord(
        id=IDS.make("batch_"), owner=file.owner, endpoint="/v1/completions", status=status,
        input_file_id=file.id, created_at=1, expires_at=2, metadata={"a": "\udfff"},
        usage={"input_tokens": 3},
    )  # fmt: skip


FAR = 4_000_000_000
FILES = [a_file(), a_file("0123456789abcdef", "fine-tune"), a_file("", "batch_output", FAR)]
BATCHES = [a_batch(FILES[0], State.IN_PROGRESS), a_batch(FILES[1], State.COMPLETED)]
UNREADABLE = ("file-4.json", "file-4.data", "file-5.json", "file-6.json")
# RESTS: what is left of an upload, of a deletion, and of records that were being written.
RESTS = ("files/file-7.data", "files/file-7.part", "files/file-5.part", "batches/batch_7.part")


def write_former(folder: Path) -> None:
    """Write what the versions before the database kept: a JSON file of each record."""
    files, batches = folder / "files", folder / "batches"
    files.mkdir(parents=True)
    batches.mkdir()
    for file in FILES:
        (files / f"{file.id}.json").write_text(json.dumps(asdict(file) | {"new": 1}))
        (files / f"{file.id}.data").write_bytes(file.id[-7:].encode())
    for batch in BATCHES:
        (batches / f"{batch.id}.json").write_text(json.dumps(asdict(batch)))
        with closing(Journal(batches / f"{batch.id}.journal")) as journal:
            journal.append([Entry(1, {"id": "a"})])
    (files / "file-4.json").write_text("{")
    (files / "file-4.data").write_text("half")
    (files / "file-5.json").write_text(json.dumps({"id": "file-5"}))
    for name in RESTS:
        (folder / name).write_text("half")
    # Its content is lost.
    (files / "file-6.json").write_text(json.dumps(asdict(replace(FILES[0], id="file-6"))))


@dataclass(frozen=True)
class Found:
    """All that a folder has."""

    files: list[FileRecord]
    batches: list[BatchRecord]
    contents: list[bytes]
    others: set[str]

    @classmethod
    def of(cls, folder: Path) -> Found:
        async def look(storage: Storage) -> Found:
            files: list[FileRecord] = []
            batches: list[BatchRecord] = []
            for owner in sorted({file.owner for file in FILES}):
                files += (await storage.files.list(owner, limit=99, descending=False))[0]
                batches += (await storage.batches.list(owner, limit=9))[0]
            contents = [storage.files.path(file).read_bytes() for file in files]
            return Found(files, batches, contents, names - {file.content_name for file in files})

        with closing(Storage(folder, LIMITS)) as storage:
            names = {path.name for path in folder.glob("*/*")}
            return asyncio.run(look(storage))


FORMER = Found(
    files=sorted(FILES, key=lambda file: (file.owner, file.id)),
    batches=BATCHES,
    contents=[],
    # The journal of the batch that has ended is gone.
    others={*UNREADABLE, f"{BATCHES[0].id}.journal"},
)


def damaged(folder: Path) -> list[Path]:
    return list(folder.glob("records.db.damaged-*[0-9]"))
