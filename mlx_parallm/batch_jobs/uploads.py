"""Files that come in parts: each part is an upload of its own until all of them become a file.

Parts are lost when the server ends, as other unfinished files are.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mlx_parallm.batch_jobs.files import FileStore, Upload
from mlx_parallm.batch_jobs.records import FileRecord
from mlx_parallm.storage import disk
from mlx_parallm.storage.disk import finished, in_thread
from mlx_parallm.storage.ids import IdMaker
from mlx_parallm.types.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestTooLargeError,
)

# EXPIRY_S: seconds after its creation in which an upload must be completed, as at OpenAI.
EXPIRY_S = 3600
# MAX_UPLOADS: most uploads of an owner that are remembered, ended ones included.
MAX_UPLOADS = 100
# MAX_PARTS: most parts of an upload.
MAX_PARTS = 1000
# PIECE_BYTES: bytes of a part that are read at once.
PIECE_BYTES = 1 << 20
PENDING, COMPLETED, CANCELLED = "pending", "completed", "cancelled"


@dataclass(slots=True, kw_only=True, eq=False)
class PartedUpload:
    """A file whose parts are coming, or have come. Times are Unix seconds.

    Attributes:
        id: of the upload.
        owner: a digest of an API key.
        filename: of the file.
        purpose: of the file.
        num_bytes: of the whole file, as declared.
        created_at: when it was begun.
        expires_after_s: seconds after which the file expires; None: never.
        parts: the parts that are complete, by their ids.
        status: in OpenAI's words.
        is_ending: True while the parts are put together.
        part_ids: the parts of the file, once it is complete.
        file: the file, once it is complete.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_after_s: int | None
    parts: dict[str, Upload] = field(default_factory=dict[str, Upload])
    status: str = PENDING
    is_ending: bool = False
    part_ids: Sequence[str] = ()
    file: FileRecord | None = None

    @property
    def expires_at(self) -> int:
        """The end of the time in which it must be completed."""
        return self.created_at + EXPIRY_S

    @property
    def num_part_bytes(self) -> int:
        """The bytes of all parts together."""
        return sum(part.num_bytes for part in self.parts.values())

    def end(self, status: str) -> None:
        """Let it end; parts that are not in the file are removed."""
        self.status = status
        for part in self.parts.values():
            part.abandon()
        self.parts.clear()


class UploadStore:
    """The uploads in parts of a folder. Its methods belong to one event loop."""

    def __init__(
        self,
        files: FileStore,
        max_file_bytes: int,
        ids: IdMaker,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._files = files
        self._max_file_bytes = max_file_bytes
        self._ids = ids
        self._now = now
        # By owner, the oldest first.
        self._uploads: dict[str, dict[str, PartedUpload]] = {}
        files.sweepers.append(self._sweep)

    async def create(
        self,
        owner: str,
        *,
        filename: str,
        purpose: str,
        num_bytes: int,
        expires_after_s: int | None,
    ) -> PartedUpload:
        """Begin an upload.

        Raises:
            RequestTooLargeError: there is no room for such a file.
            OverloadedError: too many of the owner's uploads have not ended.
        """
        await self._files.sweep()
        self._files.check_room(num_bytes)
        self._make_room(owner)
        upload = PartedUpload(
            id=self._ids.make("upload_"),
            owner=owner,
            filename=filename,
            purpose=purpose,
            num_bytes=num_bytes,
            created_at=int(self._now()),
            expires_after_s=expires_after_s,
        )
        self._uploads.setdefault(owner, {})[upload.id] = upload
        return upload

    def get(self, upload_id: str, owner: str) -> PartedUpload:
        """Return an upload of this owner.

        Raises:
            NotFoundError: the owner has none of this id.
        """
        self._sweep()
        upload = self._uploads.get(owner, {}).get(upload_id)
        if upload is None:
            raise NotFoundError(f"No such upload: {upload_id[:64]!r}.", param="upload_id")
        return upload

    def pending(self, upload_id: str, owner: str) -> PartedUpload:
        """Return an upload that goes on; see ``get``.

        Raises:
            ConflictError: it has ended, or its parts are put together.
        """
        upload = self.get(upload_id, owner)
        if upload.status != PENDING or upload.is_ending:
            status = "being completed" if upload.is_ending else upload.status
            raise ConflictError(f"The upload is {status}.", param="upload_id")
        return upload

    async def begin_part(self) -> Upload:
        """Begin a part, which ``add_part`` adds once it is written; else abandon it."""
        return await self._files.begin()

    def check_part(self, upload: PartedUpload, num_bytes: int) -> None:
        """Raise RequestTooLargeError if a part of so many bytes is too much beside the others."""
        if upload.num_part_bytes + num_bytes > self._max_file_bytes:
            raise RequestTooLargeError(
                f"The parts of an upload may have {self._max_file_bytes} bytes together."
            )

    def add_part(self, upload: PartedUpload, part: Upload) -> str:
        """Add a part that is written; return its id.

        Raises:
            NotFoundError, ConflictError: the upload has ended meanwhile.
            RequestTooLargeError: other parts have come meanwhile.
        """
        self.pending(upload.id, upload.owner)
        self.check_part(upload, part.num_bytes)
        if len(upload.parts) >= MAX_PARTS:
            raise InvalidRequestError(f"An upload has at most {MAX_PARTS} parts.")
        part_id = self._ids.make("part_")
        upload.parts[part_id] = part
        part.pause()
        return part_id

    async def complete(
        self, upload_id: str, owner: str, part_ids: Sequence[str], md5: str | None
    ) -> PartedUpload:
        """Put parts together in an order; parts that it lacks are removed.

        Repeating what has completed an upload returns it again.

        Raises:
            NotFoundError: the owner has no such upload.
            ConflictError: it has ended otherwise.
            InvalidRequestError: a part is unknown or there twice, or they have other bytes than
                were declared, or another digest; the upload goes on.
            StorageError: the disk refused it; the upload is cancelled.
        """
        known = self.get(upload_id, owner)
        if known.status == COMPLETED and list(known.part_ids) == list(part_ids):
            return known
        upload = self.pending(upload_id, owner)
        chosen = _chosen(upload, part_ids)
        upload.is_ending = True
        try:
            await finished(self._complete(upload, chosen, md5))
        finally:
            upload.is_ending = False
        upload.part_ids = tuple(part_ids)
        return upload

    def cancel(self, upload_id: str, owner: str) -> PartedUpload:
        """Cancel an upload, and remove its parts; see ``pending``."""
        upload = self.pending(upload_id, owner)
        upload.end(CANCELLED)
        return upload

    async def _complete(
        self, upload: PartedUpload, chosen: Sequence[Upload], md5: str | None
    ) -> None:
        if md5 is not None and await in_thread(_md5, chosen) != md5.lower():
            raise InvalidRequestError("The parts together have another MD5.", param="md5")
        try:
            first = await self._joined(chosen)
            upload.file = await self._files.commit(
                first,
                owner=upload.owner,
                filename=upload.filename,
                purpose=upload.purpose,
                expires_after_s=upload.expires_after_s,
            )
        except BaseException:
            # Parts that were put together are not there alone any more.
            upload.end(CANCELLED)
            raise
        upload.end(COMPLETED)

    async def _joined(self, chosen: Sequence[Upload]) -> Upload:
        """Append all parts but the first to that one: beside them, the disk needs room for one."""
        first, *others = chosen
        await in_thread(first.resume)
        for other in others:
            await in_thread(_append, first, other)
            first.count(other.num_bytes)
            other.abandon()
        return first

    def _make_room(self, owner: str) -> None:
        """Forget the oldest ended upload of an owner that has as many as may be."""
        uploads = self._uploads.get(owner, {})
        if len(uploads) < MAX_UPLOADS:
            return
        ended = [upload for upload in uploads.values() if upload.status != PENDING]
        if not ended:
            raise OverloadedError(
                f"{MAX_UPLOADS} uploads have not ended; complete or cancel some.", retry_after_s=60
            )
        del uploads[ended[0].id]

    def _sweep(self) -> None:
        """Forget the uploads whose time is over, and remove their parts."""
        now = self._now()
        for owner, uploads in list(self._uploads.items()):
            for upload in list(uploads.values()):
                if upload.expires_at > now:
                    break
                if not upload.is_ending:
                    upload.end(upload.status)
                    del uploads[upload.id]
            if not uploads:
                del self._uploads[owner]


def _chosen(upload: PartedUpload, part_ids: Sequence[str]) -> list[Upload]:
    """Return the parts of these ids, in this order."""
    seen: set[str] = set()
    for part_id in part_ids:
        if part_id not in upload.parts or part_id in seen:
            problem = "is there twice" if part_id in seen else "is no part of the upload"
            raise InvalidRequestError(f"{part_id[:64]!r} {problem}.", param="part_ids")
        seen.add(part_id)
    chosen = [upload.parts[part_id] for part_id in part_ids]
    num_bytes = sum(part.num_bytes for part in chosen)
    if num_bytes != upload.num_bytes:
        raise InvalidRequestError(
            f"The parts have {num_bytes} bytes together, and {upload.num_bytes} were declared.",
            param="part_ids",
        )
    return chosen


def _pieces(part: Upload) -> Iterator[bytes]:
    with disk.storage_errors(), part.path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _append(first: Upload, other: Upload) -> None:
    for piece in _pieces(other):
        first.write(piece)


def _md5(parts: Sequence[Upload]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for part in parts:
        for piece in _pieces(part):
            digest.update(piece)
    return digest.hexdigest()
