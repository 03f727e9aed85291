"""The folders of a model's steps in ART's layout: ``checkpoints/0001`` and so on."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from mlx_parallm.art.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"


class Checkpoints:
    """The completed steps of one model."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is the model's folder, ``.art/PROJECT/models/NAME``."""
        self.root = (folder / "checkpoints").resolve()
        self.root.mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        """Return the steps in ascending order."""
        names = [folder.name for folder in self.root.iterdir() if folder.is_dir()]
        return sorted(int(name) for name in names if name.isdigit())

    def latest(self) -> int:
        """Return the last step; 0 before the first."""
        return max(self.steps(), default=0)

    def folder(self, step: int) -> Path | None:
        """Return a step's folder; None if it was not trained, or was deleted."""
        folder = self._path(step)
        return folder if folder.is_dir() else None

    @contextmanager
    def writing(self, step: int) -> Generator[Path]:
        """Yield an empty folder that becomes the step's if the block ends without an error.

        Raises:
            CheckpointError: the block wrote nothing.
        """
        begun = self.root / f".{step:04d}.begun"
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir()
        try:
            yield begun
            if not any(begun.iterdir()):
                raise CheckpointError(f"Training wrote nothing for step {step}.")
            begun.rename(self._path(step))
        finally:
            shutil.rmtree(begun, ignore_errors=True)

    def delete(self, step: int) -> None:
        """Remove a step's folder."""
        shutil.rmtree(self._path(step))

    def _path(self, step: int) -> Path:
        return self.root / f"{step:04d}"


def is_adapter(folder: Path) -> bool:
    """True if a checkpoint is an adapter of PEFT or mlx-lm; if not, it is a whole model."""
    return (folder / ADAPTER_CONFIG).is_file()
