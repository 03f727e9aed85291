"""examples/safetensors_from_bin.py, with stand-ins for torch, which tests do not have."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples import safetensors_from_bin as example


@dataclass
class Tensor:
    """A tensor as far as the script looks at it."""

    address: int
    shape: tuple[int, ...] = (2, 3)
    storage: int = 24
    made: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return 4 * self.numel()

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return (3, 1)

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: self.storage)

    def clone(self) -> Tensor:
        return Tensor(-self.address, self.shape, self.nbytes, [*self.made, "clone"])

    def contiguous(self) -> Tensor:
        return Tensor(self.address, self.shape, self.storage, [*self.made, "contiguous"])


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the script saves, by the name of the file; pickles hold names of tensors."""
    files: dict[str, Any] = {}

    def load(file: Path, *, map_location: str, weights_only: bool) -> dict[str, Tensor]:
        assert map_location == "cpu"
        assert weights_only, "other pickles can run code"
        content = json.loads(file.read_text())
        return {name: Tensor(address) for name, address in content.items()}

    def save_file(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
        assert metadata == {"format": "pt"}
        file.write_bytes(bytes(10 * len(tensors)))
        files[file.name] = tensors

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(load=load))
    monkeypatch.setitem(sys.modules, "safetensors.torch", SimpleNamespace(save_file=save_file))
    return files


def write_checkpoint(folder: Path, parts: list[dict[str, int]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "source.spm").write_bytes(b"pieces")
    (folder / "flax_model.msgpack").write_bytes(b"others")
    names = [f"pytorch_model-{number}.bin" for number in range(len(parts))]
    if len(parts) == 1:
        names = [example.WHOLE]
    else:
        placed = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        (folder / example.INDEX).write_text(json.dumps({"weight_map": placed}))
    for name, part in zip(names, parts, strict=True):
        (folder / name).write_text(json.dumps(part))
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    example.main()


def test_tied_weights_are_written_once(
    saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "in", [{"shared": 1, "head": 1, "other": 2}])
    run(monkeypatch, source, tmp_path / "out")
    assert saved["model.safetensors"].keys() == {"shared", "other"}
    left = {file.name for file in (tmp_path / "out").iterdir()}
    assert left == {"config.json", "model.safetensors", "source.spm"}


def test_parts_get_an_index(
    saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "in", [{"a": 1, "b": 2}, {"c": 3}])
    run(monkeypatch, source, tmp_path / "out")
    first, second = sorted(saved)
    assert (first, second) == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 30},
        "weight_map": {"a": first, "b": first, "c": second},
    }


def test_a_part_of_other_memory_is_copied() -> None:
    assert example.alone(Tensor(1)).made == ["contiguous"]
    assert example.alone(Tensor(1, storage=96)).made == ["clone", "contiguous"]


@pytest.mark.parametrize("change", ["no weights", "missing part", "elsewhere", "not empty"])
def test_what_is_refused(
    change: str, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "in", [{"a": 1}, {"b": 2}])
    if change == "no weights":
        (source / example.INDEX).unlink()
    elif change == "missing part":
        (source / "pytorch_model-1.bin").unlink()
    elif change == "elsewhere":
        (source / example.INDEX).write_text('{"weight_map": {"a": "../secret.bin"}}')
    else:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("kept")
    message = {
        "no weights": "has no pytorch_model.bin",
        "missing part": "has no pytorch_model-1.bin",
        "elsewhere": "outside the folder",
        "not empty": "is not empty",
    }[change]
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, source, tmp_path / "out")
    assert not saved
