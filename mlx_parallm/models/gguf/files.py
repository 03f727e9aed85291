"""The parts of a split GGUF model, and the model that they are."""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.confinement import GGUF, GGUF_PART
from mlx_parallm.models.gguf.families import ROPE_FREQS, Tensors, named_tensors
from mlx_parallm.models.gguf.fields import Fields
from mlx_parallm.models.gguf.header import GgufHeader, TensorInfo, read_header
from mlx_parallm.models.gguf.tensor_types import FLOATS, PACKED
from mlx_parallm.models.gguf.tokenizer import TokenizerFiles, tokenizer_files
from mlx_parallm.types.errors import ModelLoadError

#: ``SERVED``: types of tensors that are read as they are.
SERVED = (*FLOATS, *PACKED)
# MAX_FACTORS: of the tensor of ``ROPE_FREQS``: pairs of dimensions of a head.
MAX_FACTORS = 4096


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model of one or several files.

    Attributes:
        path: the file that names it, the first of several.
        tensors: under the names of weights.
        sources: the file of each weight.
        texts: its tokenizer.
    """

    path: Path
    tensors: Tensors
    sources: dict[str, Path]
    texts: TokenizerFiles


def part_paths(path: Path) -> list[Path]:
    """Return the files of a model, all of them; the name of the first of several says their number.

    Raises:
        ModelLoadError: it is not the first, or others are missing.
    """
    match = GGUF_PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if path.name not in names:
        raise ModelLoadError(f"{path}: a part of this number does not exist.")
    if path.name != names[0]:
        raise ModelLoadError(f"{path} is a part of a model; name the first part, {names[0]}.")
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelLoadError(f"{path.parent} lacks {', '.join(missing[:3])}{more}.")
    return [path.parent / name for name in names]


def check_not_of_gguf(folder: Path) -> None:
    """Raise ModelLoadError, which names a file, if a folder has no weights but in GGUF files."""
    files = sorted(folder.glob(f"*{GGUF}"))
    if files and not any(folder.glob("*.safetensors")):
        raise ModelLoadError(
            f"{folder} has GGUF files and no safetensors: name one of these files, such as "
            f"{files[0]}."
        )


def read_model(path: Path, *, kinds: Collection[str] = SERVED) -> GgufModel:
    """Return a model whose files have been checked, but no tensor read.

    Args:
        path: the file, or the first part.
        kinds: types of tensors that may occur.

    Raises:
        ModelLoadError: a file is damaged or missing, or the model is not one that is served.
    """
    fields, tensors, places = _checked(path, kinds)
    sources = {name: places[tensor.name] for name, tensor in tensors.named.items()}
    texts = tokenizer_files(fields, tensors.config["vocab_size"])
    return GgufModel(path, tensors, sources, texts)


def check_model(path: Path) -> None:
    """Raise ModelLoadError if a model cannot be served; its tokenizer is not looked at."""
    _checked(path, SERVED)


def _checked(path: Path, kinds: Collection[str]) -> tuple[Fields, Tensors, dict[str, Path]]:
    """Return a model's metadata, its tensors, and the file of each by its name there."""
    headers = [read_header(part) for part in part_paths(path)]
    fields = Fields(headers[0])
    _check_parts(headers)
    tensors: dict[str, TensorInfo] = {}
    places: dict[str, Path] = {}
    for header in headers:
        if twice := tensors.keys() & header.tensors.keys():
            raise ModelLoadError(f"{header.path}: tensor {min(twice)!r} is in another part too.")
        tensors |= header.tensors
        places |= dict.fromkeys(header.tensors, header.path)
    named = named_tensors(fields, tensors, _rope_factors(tensors, places))
    _check_kinds(path, named.named.values(), kinds)
    return fields, named, places


def _check_parts(headers: list[GgufHeader]) -> None:
    """Refuse parts that do not call themselves what they are named."""
    count = headers[0].values.get("split.count", 0)
    if len(headers) == 1 and count in (0, 1):
        return
    for number, header in enumerate(headers):
        place = header.values.get("split.no"), header.values.get("split.count")
        if place != (number, len(headers)):
            raise ModelLoadError(
                f"{header.path} does not say that it is "
                f"part {number} of {len(headers)}, counted from 0."
            )


def _check_kinds(path: Path, tensors: Collection[TensorInfo], kinds: Collection[str]) -> None:
    for tensor in tensors:
        name = tensor.type.name
        allowed = [kind for kind in kinds if len(tensor.shape) > 1 or kind in FLOATS]
        if name not in allowed:
            raise ModelLoadError(
                f"{path}: tensor {tensor.name} is of the type {name}; read as they are: "
                f"{', '.join(allowed)}. To quantise it anew, run: "
                f"mlx_parallm models convert {path} --mlx-path FOLDER"
            )


def _rope_factors(
    tensors: dict[str, TensorInfo], places: dict[str, Path]
) -> tuple[float, ...] | None:
    """Return the numbers of ``ROPE_FREQS``, the only ones that change the config."""
    if ROPE_FREQS not in tensors:
        return None
    tensor, path = tensors[ROPE_FREQS], places[ROPE_FREQS]
    (count, *others) = tensor.shape
    if others or count > MAX_FACTORS or tensor.type.name != "F32":
        raise ModelLoadError(f"{path}: tensor {ROPE_FREQS} must be a vector of F32.")
    try:
        with path.open("rb") as file:
            file.seek(tensor.offset)
            return struct.unpack(f"<{count}f", file.read(tensor.num_bytes))
    except (OSError, struct.error) as cause:
        raise ModelLoadError(f"{path} could not be read: {cause}") from cause
