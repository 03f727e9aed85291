"""Writes a GGUF model as a folder in Hugging Face's form, a few rows of a tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlx_parallm.models.checkpoints.weight_files import WHOLE
from mlx_parallm.models.gguf.files import GgufModel
from mlx_parallm.models.gguf.forms import GROUP, Bytes, Form, Part, form_of, model_dtype
from mlx_parallm.models.gguf.header import TensorInfo
from mlx_parallm.types.errors import ModelLoadError

#: ``OnShare``: called with the share of bytes that is written, from 0 to 1.
OnShare = Callable[[float], None]

# CHUNK_BYTES: bytes of a tensor that are converted at once.
CHUNK_BYTES = 8 << 20
# ALIGNMENT: of the bytes before the arrays of a safetensors file.
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight that is to be written.

    Attributes:
        tensor: its place in a file.
        source: the file.
        form: how it is written.
        head_size: rows of a head, if they are ordered for llama.cpp's rotation; 0 if not.
    """

    tensor: TensorInfo
    source: Path
    form: Form
    head_size: int = 0


def weights_of(
    model: GgufModel, other_form: Callable[[TensorInfo], Form | None] = lambda tensor: None
) -> dict[str, Weight]:
    """Return the weights of a model by name; ``other_form`` may return another form of a tensor."""
    tensors = model.tensors
    kinds: dict[str, int] = {}
    for tensor in tensors.named.values():
        if len(tensor.shape) > 1:
            kinds[tensor.type.name] = kinds.get(tensor.type.name, 0) + tensor.num_bytes
    dtype = model_dtype(kinds)
    weights: dict[str, Weight] = {}
    for name, tensor in tensors.named.items():
        offset = tensors.family.norm_offset if "norm" in name else 0.0
        form = other_form(tensor) or form_of(name, tensor.type, len(tensor.shape), dtype, offset)
        head_size = tensors.head_sizes.get(name, 0)
        weights[name] = Weight(tensor, model.sources[name], form, head_size)
    return weights


def write_folder(
    target: Path, model: GgufModel, weights: Mapping[str, Weight], on_share: OnShare
) -> None:
    """Fill an existing folder with a model's config, tokenizer and weights.

    Raises:
        ModelLoadError: the disk has not room for it, or a file cannot be read or written.
    """
    arrays = {name: weight.form.parts(weight.tensor.shape) for name, weight in weights.items()}
    needed = sum(part.num_bytes for parts in arrays.values() for part in parts)
    free = shutil.disk_usage(target).free
    if needed > free:
        raise ModelLoadError(
            f"{model.path} takes {needed:,} bytes in {target.parent}, where {free:,} are free."
        )
    packed = [part for parts in arrays.values() for part in parts if part.dtype == "U32"]
    texts, ends = model.texts, model.texts.end_ids
    config = {**model.tensors.config, "eos_token_id": ends}
    if packed:
        # The bits of each layer are those that its arrays have.
        config["quantization"] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": ends},
        "tokenizer.json": texts.tokenizer,
        "tokenizer_config.json": texts.config,
    }
    try:
        for name, content in files.items():
            text = json.dumps(content, ensure_ascii=False)
            (target / name).write_text(text, encoding="utf-8")
        with (target / WHOLE).open("wb") as file:
            _write_weights(file, weights, arrays, on_share)
    except OSError as cause:
        raise ModelLoadError(f"{target} could not be written: {cause}") from cause


def _write_weights(
    file: BinaryIO,
    weights: Mapping[str, Weight],
    arrays: Mapping[str, list[Part]],
    on_share: OnShare,
) -> None:
    """Write a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    places: dict[str, list[int]] = {}
    end = 0
    for name, parts in arrays.items():
        stem = name.rpartition(".")[0]
        places[name] = []
        for part in parts:
            places[name].append(end)
            span = [end, end + part.num_bytes]
            entry = {"dtype": part.dtype, "shape": part.shape, "data_offsets": span}
            header[f"{stem}.{part.leaf}"] = entry
            end = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    start, done = file.tell(), 0
    total = sum(weight.tensor.num_bytes for weight in weights.values())
    for name, weight in weights.items():
        positions = [start + place for place in places[name]]
        for rows in _chunks(weight):
            for number, array in enumerate(weight.form.convert(rows)):
                file.seek(positions[number])
                file.write(np.ascontiguousarray(array).data)
                positions[number] += array.nbytes
            done += rows.nbytes
            on_share(done / total)


def _chunks(weight: Weight) -> Iterator[Bytes]:
    """Yield the bytes of some rows at a time, in the order that transformers has.

    A vector's rows have one number.
    """
    tensor = weight.tensor
    count = prod(tensor.shape[:-1] or tensor.shape)
    width = tensor.num_bytes // count
    step = max(1, CHUNK_BYTES // width)
    if weight.head_size:
        step = max(weight.head_size, step // weight.head_size * weight.head_size)
    with weight.source.open("rb") as file:
        file.seek(tensor.offset)
        for first in range(0, count, step):
            num_rows = min(step, count - first)
            data = file.read(num_rows * width)
            if len(data) < num_rows * width:
                raise ModelLoadError(f"{weight.source} became shorter while it was read.")
            rows = np.frombuffer(data, np.uint8).reshape(num_rows, width)
            yield _reordered(rows, weight.head_size) if weight.head_size else rows


def _reordered(rows: Bytes, head_size: int) -> Bytes:
    """Return rows of heads whose halves rotate together, not their neighbours."""
    pairs = rows.reshape(-1, head_size // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
