"""The files that hold a checkpoint's weights, and folders in which mlx_lm finds no others."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.json_values import is_object

logger = logging.getLogger(__name__)

#: ``INDEX``: the file that says which file holds each weight.
INDEX = "model.safetensors.index.json"
#: ``WHOLE``: the name of the one file of a checkpoint that is not cut.
WHOLE = "model.safetensors"
# PATTERN: the files that mlx_lm reads, all of them.
PATTERN = "model*.safetensors"
# OTHER_WHOLE: the name that mlx-examples gives the one file; those of Whisper have it on the hub.
OTHER_WHOLE = "weights.safetensors"
# NPZ: its older form, and how it becomes the newer one.
NPZ = "weights.npz"
CONVERT_NPZ = (
    "python -c \"import mlx.core as mx; mx.save_safetensors('weights.safetensors', "
    "mx.load('weights.npz'))\" in the folder converts weights.npz"
)
#: ``PICKLES``: the end of messages about folders that lack safetensors.
PICKLES = (
    "Weights that are pickles, such as pytorch_model.bin, can run code and are not read: "
    "examples/safetensors_from_bin.py converts them."
)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint's weights, sorted; none if it has none.

    The index decides. Without one it is ``model.safetensors`` alone, or all ``model*.safetensors``,
    or ``weights.safetensors``.

    Raises:
        ModelLoadError: the index cannot be read, or names files that are not there.
    """
    named = set(weight_map(folder).values())
    there = [name for name in named if (folder / name).is_file()]
    if named and there:
        if missing := sorted(named - set(there)):
            raise ModelLoadError(f"{folder} lacks {', '.join(missing)}, which {INDEX} names.")
        return sorted(folder / name for name in there)
    whole = folder / WHOLE
    files = [whole] if whole.is_file() else sorted(folder.glob(PATTERN))
    if not files and (folder / OTHER_WHOLE).is_file():
        files = [folder / OTHER_WHOLE]
    if named and files:
        logger.warning("%s: no file that %s names is there, so it is not read", folder, INDEX)
    elif named:
        raise ModelLoadError(f"{folder} has none of the files that {INDEX} names.")
    return files


def check_has_weights(folder: Path) -> None:
    """Raise ModelLoadError if a folder has no weights that can be read, or see ``weight_files``."""
    if weight_files(folder):
        return
    if (folder / NPZ).is_file():
        raise ModelLoadError(f"{folder} has no {PATTERN}. {CONVERT_NPZ}.")
    raise ModelLoadError(f"{folder} has no {PATTERN}. {PICKLES}")


def missing_files(folder: Path) -> list[str]:
    """Return the names of files in the index that are not in the folder, sorted.

    Raises:
        ModelLoadError: the index cannot be read.
    """
    names = set(weight_map(folder).values())
    return sorted(name for name in names if not (folder / name).is_file())


def weight_map(folder: Path) -> dict[str, str]:
    """Return the name of the file of each weight in the index; empty if there is no index.

    Raises:
        ModelLoadError: the index cannot be read, or names files elsewhere or of another format.
    """
    file = folder / INDEX
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as cause:
        raise ModelLoadError(f"{file} could not be read: {cause}") from cause
    weights = content.get("weight_map") if is_object(content) else None
    if not is_object(weights):
        raise ModelLoadError(f"{file} must be a JSON object with an object weight_map.")
    placed: dict[str, str] = {}
    for key, name in weights.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelLoadError(f"{file}: {name!r} is not the name of a file in the folder.")
        if not name.endswith(".safetensors"):
            raise ModelLoadError(f"{file}: {name} is not a safetensors file.")
        placed[key] = name
    return placed


@contextlib.contextmanager
def mlx_lm_folder(folder: Path) -> Generator[Path]:
    """Return a folder in which mlx_lm reads the weights of ``weight_files`` and no others.

    It is the folder itself if that has no other files. Else it holds links, and is removed after
    the context; arrays that are read lazily keep their files open.

    Raises:
        ModelLoadError: see ``check_has_weights``.
    """
    check_has_weights(folder)
    files = weight_files(folder)
    if files == sorted(folder.glob(PATTERN)):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="mlx_parallm-") as name:
        link_folder(folder, Path(name), files)
        yield Path(name)


def link_folder(
    folder: Path, target: Path, files: list[Path], config: Mapping[str, Any] | None = None
) -> None:
    """Fill an empty folder with links to a checkpoint.

    Args:
        folder: the checkpoint.
        target: the empty folder.
        files: its weights; they get names that mlx_lm reads.
        config: the content of ``config.json``; None for that of the checkpoint.
    """
    for entry in folder.iterdir():
        is_other = entry.suffix == ".safetensors" or entry.name == INDEX
        if not is_other and not (config is not None and entry.name == "config.json"):
            (target / entry.name).symlink_to(entry.resolve())
    for number, file in enumerate(files):
        name = WHOLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        (target / name).symlink_to(file.resolve())
    if config is not None:
        (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
