"""The data folder of a server: files and batches, for one process at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from mlx_parallm.batch_jobs.files import FileLimits, FileStore
from mlx_parallm.batch_jobs.store import BatchStore
from mlx_parallm.storage import disk
from mlx_parallm.storage.ids import IdMaker


class Storage:
    """Everything stored in a data folder."""

    def __init__(
        self, folder: Path, limits: FileLimits, now: Callable[[], float] = time.time
    ) -> None:
        """Open the folder, creating it if needed.

        Raises:
            StorageInUseError: another process uses it.
            StorageError: it cannot be used.
        """
        with disk.storage_errors():
            disk.make_folder(folder)
            self._lock = disk.FolderLock(folder)
            try:
                ids = IdMaker()
                self.files = FileStore(folder / "files", limits, ids, now)
                self.batches = BatchStore(folder / "batches", ids)
            except BaseException:
                self._lock.release()
                raise
        for record in self.batches.unfinished():
            self.files.use(record.input_file_id, record.id)

    def close(self) -> None:
        """Release the folder, so that another process can open it."""
        self._lock.release()
