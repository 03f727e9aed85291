"""Checkpoints of a session: its parameters and moments after some of its steps."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load, save

from mlx_parallm.storage import disk
from mlx_parallm.training.session_files import CHECKPOINTS, SessionFiles
from mlx_parallm.types.errors import StorageError
from mlx_parallm.types.gradients import TrainingArrays

logger = logging.getLogger(__name__)
#: ``NUM_KEPT``: the last checkpoints are kept, besides the best one.
NUM_KEPT = 3
SUFFIX = ".safetensors"
ARRAYS = ("theta", "first_moment", "second_moment")


class Checkpoints:
    """The checkpoints in a session's folder."""

    def __init__(self, files: SessionFiles) -> None:
        """Find those there are; delete what a crash has left of one that was being written.

        One of a step that has no record was never made: the process died before it noted the step.
        """
        self._files = files
        sizes = files.checkpoint_bytes
        sizes.clear()
        with disk.storage_errors():
            for path in sorted(files.folder.glob(CHECKPOINTS)):
                step = _step(path)
                if step is None or step > files.num_steps:
                    path.unlink(missing_ok=True)
                else:
                    sizes[step] = path.stat().st_size

    @property
    def steps(self) -> list[int]:
        """The steps after which there is one, in their order."""
        return sorted(self._files.checkpoint_bytes)

    def latest(self) -> tuple[int, TrainingArrays | None]:
        """Return the last one that can be read, and its step; 0 and None for the beginning."""
        for step in reversed(self.steps):
            try:
                return step, self.read(step)
            except StorageError as problem:
                name = self._files.config.id
                logger.warning("a checkpoint of session %s is left out: %s", name, problem)
        return 0, None

    def read(self, step: int) -> TrainingArrays:
        """Return the checkpoint of a step; raise StorageError if it cannot be read."""
        with disk.storage_errors():
            content = self._path(step).read_bytes()
        try:
            arrays = load(content)
            return TrainingArrays(*(arrays[name] for name in ARRAYS))
        except (SafetensorError, KeyError, ValueError) as problem:
            raise StorageError(f"The checkpoint of step {step} is damaged.") from problem

    def write(self, step: int, arrays: TrainingArrays) -> None:
        """Write a checkpoint durably, and the records of all steps before it."""
        self._files.check_open()
        self._files.sync_records()
        content = save({name: getattr(arrays, name) for name in ARRAYS})
        disk.replace(self._path(step), content)
        self._files.checkpoint_bytes[step] = len(content)

    def drop(self, step: int) -> None:
        """Delete a checkpoint."""
        with disk.storage_errors():
            self._path(step).unlink(missing_ok=True)
        self._files.checkpoint_bytes.pop(step, None)

    def prune(self, keep: Collection[int] = ()) -> None:
        """Delete all but the last ones and those of ``keep``."""
        for step in self.steps[:-NUM_KEPT]:
            if step not in keep:
                self.drop(step)

    def _path(self, step: int) -> Path:
        return self._files.folder / f"{CHECKPOINTS.rstrip('*')}{step:08d}{SUFFIX}"


def _step(path: Path) -> int | None:
    """Return the step of a checkpoint's file; None for other files."""
    digits = path.stem.removeprefix(CHECKPOINTS.rstrip("*"))
    return int(digits) if path.suffix == SUFFIX and digits.isdecimal() else None
