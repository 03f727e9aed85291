"""Convert a checkpoint of pickles, such as ``pytorch_model.bin``, to safetensors.

Run it where torch is; the server itself never reads pickles:

    python3 -m venv ~/convert
    ~/convert/bin/pip install torch numpy safetensors huggingface_hub
    ~/convert/bin/python examples/safetensors_from_bin.py Helsinki-NLP/opus-mt-en-de ~/opus-mt-en-de
    mlx_parallm serve --model ~/opus-mt-en-de

The first argument is a folder or a hub id. The other files of the checkpoint, such as its config
and tokenizer, are copied. torch reads nothing but tensors from the pickles (``weights_only``).
Tensors that share memory, as tied embeddings do, are written once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

INDEX = "pytorch_model.bin.index.json"
#: ``WHOLE``: the one file of a checkpoint that is not cut.
WHOLE = "pytorch_model.bin"
#: ``COPIED``: what a server reads beside weights.
COPIED = ("*.json", "*.model", "*.spm", "*.txt", "*.jinja", "*.tiktoken")


def main() -> None:
    """Write a folder of safetensors; exit with a message if there is nothing to convert."""
    parser = argparse.ArgumentParser(description="Convert pickled weights to safetensors.")
    parser.add_argument("source", help="a folder, or a hub id such as org/name")
    parser.add_argument("target", type=Path, help="the folder to write, which must be empty or new")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    args = parser.parse_args()
    target: Path = args.target.expanduser()
    if target.exists() and any(target.iterdir()):
        sys.exit(f"{target} is not empty.")
    folder = folder_of(args.source, args.revision)
    files = pickles_in(folder)
    target.mkdir(parents=True, exist_ok=True)
    copy_others(folder, target)
    names = [output_name(number, len(files)) for number in range(len(files))]
    placed = write_all(files, [target / name for name in names])
    if len(files) > 1:
        write_index(target, placed)
    print(f"{target}: {len(placed)} tensors in {', '.join(names)}")


def folder_of(source: str, revision: str | None) -> Path:
    """Return a folder, or the snapshot of a hub id."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    patterns = [*COPIED, "pytorch_model*.bin"]
    return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))


def pickles_in(folder: Path) -> list[Path]:
    """Return the files of a checkpoint's weights; exit with a message if there are none."""
    index = folder / INDEX
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if any(Path(name).name != name for name in names):
            sys.exit(f"{index} names files outside the folder.")
        files = [folder / name for name in sorted(names)]
    else:
        files = [folder / WHOLE]
    if missing := [file.name for file in files if not file.is_file()]:
        sys.exit(f"{folder} has no {', '.join(missing)}.")
    return files


def output_name(number: int, count: int) -> str:
    """Return the name of an output file, as transformers chooses it."""
    if count == 1:
        return "model.safetensors"
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


def copy_others(folder: Path, target: Path) -> None:
    """Copy what is not weights; a config that names the dtype of torch stays as it is."""
    for pattern in COPIED:
        for file in folder.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)


def write_all(files: list[Path], targets: list[Path]) -> dict[str, str]:
    """Convert each file and return the output's name of each tensor."""
    import torch  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    from safetensors.torch import save_file  # noqa: PLC0415

    placed: dict[str, str] = {}
    for file, target in zip(files, targets, strict=True):
        content = torch.load(file, map_location="cpu", weights_only=True)
        tensors = {name: alone(tensor) for name, tensor in distinct(content)}
        save_file(tensors, target, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, target.name)
    return placed


def distinct(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a pickle by name, without those that are an earlier one's memory."""
    seen: set[Any] = set()
    for name, tensor in content.items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() == 0 or place not in seen:
            seen.add(place)
            yield name, tensor


def alone(tensor: Any) -> Any:
    """Return a tensor in row order whose memory holds nothing else."""
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone().contiguous() if is_part else tensor.contiguous()


def write_index(target: Path, placed: Mapping[str, str]) -> None:
    """Write which file holds each tensor."""
    sizes = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    content = {"metadata": {"total_size": sizes}, "weight_map": dict(placed)}
    text = json.dumps(content, indent=1)
    (target / "model.safetensors.index.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
