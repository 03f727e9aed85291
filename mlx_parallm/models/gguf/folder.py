"""Folders in the user's cache that hold GGUF models in Hugging Face's form.

Everything that reads models reads folders. A model's is written once: its weights keep their bits,
so it takes about as much room as the file. It is removed when another GGUF model is written and
its own file is gone or has changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path

from mlx_parallm.machine import user_cache
from mlx_parallm.models.checkpoints.contents import FileState
from mlx_parallm.models.gguf.files import part_paths, read_model
from mlx_parallm.models.gguf.writing import weights_of, write_folder
from mlx_parallm.types.content import digest_of
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.json_values import is_list

Progress = Callable[[str, float], None]

#: ``CACHE``: the folder in the user's cache.
CACHE = "gguf"
#: ``FORMAT``: changes with what is written, so that older folders are not read.
FORMAT = "1"
LOCK = "lock"
#: ``SOURCE``: the file of a folder that says which files it was made from.
SOURCE = "gguf_source.json"


def gguf_folder(path: Path, on_progress: Progress) -> Path:
    """Return a folder with the model of a GGUF file; it is written if it is not there yet.

    Args:
        path: the file, or the first of several parts.
        on_progress: called with a text and the share that is written, from 0 to 1.

    Raises:
        ModelLoadError: the file is damaged or not one that is served, or the cache cannot be
            written.
    """
    states = _states(part_paths(path))
    assert states is not None, "part_paths returns files"
    key = digest_of("gguf", FORMAT, *(str(astuple(state)) for state in states))
    cache = _cache_folder(path)
    target = cache / f"{path.stem[:100]}-{key[:16]}"
    if target.is_dir():
        return target
    model = read_model(path)
    with _locked(cache):
        if target.is_dir():
            return target
        _forget_stale(cache)
        part = Path(tempfile.mkdtemp(prefix="part-", dir=cache))
        try:
            text = f"Reading {path.name}"
            write_folder(part, model, weights_of(model), lambda share: on_progress(text, share))
            source = json.dumps([list(astuple(state)) for state in states])
            (part / SOURCE).write_text(source, encoding="utf-8")
            part.rename(target)
        except OSError as cause:
            raise ModelLoadError(f"{path} could not be read into {cache}: {cause}") from cause
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target


def _cache_folder(path: Path) -> Path:
    try:
        cache = user_cache(os.environ) / CACHE
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as cause:
        raise ModelLoadError(
            f"{path} needs a folder in the user's cache (XDG_CACHE_HOME): {cause}"
        ) from cause
    return cache


def _states(paths: Sequence[Path]) -> list[FileState] | None:
    """Return the states of files; None if one is gone."""
    try:
        return [FileState.of(path) for path in paths]
    except OSError:
        return None


def _forget_stale(cache: Path) -> None:
    """Remove folders whose files are gone or have changed, and those that were never finished."""
    for folder in cache.iterdir():
        if folder.is_dir() and not _is_current(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_current(folder: Path) -> bool:
    try:
        entries = json.loads((folder / SOURCE).read_bytes())
        states = _states([Path(entry[0]) for entry in entries])
    except (OSError, ValueError, RecursionError, TypeError, LookupError):
        return False
    return is_list(entries) and states is not None and entries == [[*astuple(s)] for s in states]


@contextmanager
def _locked(cache: Path) -> Generator[None]:
    """Let one process at a time write, so that several engines write a model once."""
    with (cache / LOCK).open("wb") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
