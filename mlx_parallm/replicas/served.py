"""The models that a server of a fleet starts with: those of all must have the same files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlx_parallm.config import ModelConfig
from mlx_parallm.demo_models.folders import DEMO_NAME, demo_folder
from mlx_parallm.models.checkpoints.contents import FolderContents, user_memory
from mlx_parallm.models.checkpoints.copies import copy_of
from mlx_parallm.types.content import digest_of

# LOOK_S: seconds between two looks at whether a folder or the digest of all of it is known by now.
LOOK_S = 30.0
CONFIG = "config.json"
# UNKNOWN: mark of a model that is not on this disk yet.
UNKNOWN = ""


class ServedModels:
    """Marks of models: equal ones have the same files, as far as that is known.

    Attributes:
        marks: by the models' names; none before the first look.
    """

    def __init__(self, models: Sequence[ModelConfig]) -> None:
        self._models = {_name(model): model for model in models}
        self._files: dict[str, tuple[Path, str]] = {}
        self.marks: Mapping[str, str] = {}

    async def watch(self) -> None:
        """Read what is not known yet, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Read what is not known yet."""
        self.marks = await asyncio.to_thread(
            lambda: {name: self._mark(name, model) for name, model in self._models.items()}
        )

    def _mark(self, name: str, model: ModelConfig) -> str:
        """Return a digest of sizes, small files and samples, and that of all bytes if known."""
        try:
            if name not in self._files:
                folder = local_folder(model)
                copy = None if folder is None else copy_of(str(folder))
                if folder is None or copy is None:
                    return UNKNOWN
                small = {
                    file: copy.digests[file] for file in copy.sizes if file not in copy.samples
                }
                parts = [dict(copy.sizes), small, dict(copy.samples)]
                digest = digest_of("files", json.dumps(parts, sort_keys=True))
                self._files[name] = folder, digest
            folder, digest = self._files[name]
            return f"{digest}.{FolderContents(user_memory()).see(folder).digest or ''}"
        except OSError:
            return UNKNOWN

    def difference(self, theirs: Mapping[str, str]) -> str | None:
        """Return a sentence's end on what another server serves instead; None for the same."""
        if theirs.keys() != self.marks.keys():
            if not (theirs and self.marks):
                return "cannot be compared yet: a server is starting"
            names = ", ".join(sorted(theirs))
            return f"serves {names}, and this server {', '.join(sorted(self.marks))}"
        for name, mark in self.marks.items():
            if _differ(mark, theirs[name]):
                return f"has other files of {name} than this server"
        return None


def _differ(mine: str, theirs: str) -> bool:
    """True if two marks are known to be of different files."""
    if UNKNOWN in (mine, theirs):
        return False
    files, _, content = mine.partition(".")
    other_files, _, other_content = theirs.partition(".")
    is_known = bool(content and other_content)
    return files != other_files or (is_known and content != other_content)


def _name(model: ModelConfig) -> str:
    return (*model.served_names, model.path or DEMO_NAME)[0]


def local_folder(model: ModelConfig) -> Path | None:
    """Return the folder or the GGUF file of a model; None if it is not on this disk."""
    source = model.path or DEMO_NAME
    place = demo_folder(source) or Path(source).expanduser()
    if place.exists():
        return place
    # It takes a while to import, and is needed for models of the hub alone.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        config = try_to_load_from_cache(source, CONFIG, revision=model.revision)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None
