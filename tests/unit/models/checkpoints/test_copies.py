"""A checkpoint on two machines is one, or the difference is named."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_parallm.config import EngineConfig, ModelConfig, SpeculativeConfig
from mlx_parallm.models.checkpoints import copies as copies_module
from mlx_parallm.models.checkpoints.contents import DigestMemory, FileState
from mlx_parallm.models.checkpoints.copies import check_copy, copy_of
from mlx_parallm.peers.messages import copies_of
from mlx_parallm.types.errors import ConfigError

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.model": b"pieces",
    "1_Pooling/config.json": b'{"mean": true}',
    "README.md": b"a model",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_equal_copies_pass(folder: Path) -> None:
    copy = copy_of(str(folder))
    assert copy is not None
    assert set(copy.sizes) == set(FILES) - {"README.md"}
    check_copy(copy)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda folder: (folder / "config.json").unlink(), "it lacks config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "it lacks model.safetensors"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"weight"),
            "model.safetensors has 6 bytes instead of 7",
        ),
        (
            lambda folder: (folder / "tokenizer.model").write_bytes(b"PIECES"),
            "tokenizer.model has other contents",
        ),
        (
            lambda folder: (folder / "1_Pooling/config.json").write_bytes(b'{"mean": null}'),
            "1_Pooling/config.json has other contents",
        ),
        (
            lambda folder: (folder / "model-2.safetensors").write_bytes(b"more"),
            "model-2.safetensors is not in that of the server",
        ),
    ],
)
def test_a_difference_is_named(
    folder: Path, change: Callable[[Path], object], difference: str
) -> None:
    copy = copy_of(str(folder))
    assert copy is not None
    change(folder)
    with pytest.raises(ConfigError) as refusal:
        check_copy(copy)
    machine = f"Machine {socket.gethostname()} has another {folder}: {difference}"
    assert str(refusal.value).startswith(machine)


def test_notes_beside_a_model_may_differ(folder: Path) -> None:
    copy = copy_of(str(folder))
    assert copy is not None
    (folder / "README.md").write_bytes(b"my model")
    (folder / "trainer_state.json").write_bytes(b"{}")
    check_copy(copy)


def test_a_folder_that_is_missing_is_named(folder: Path) -> None:
    copy = copy_of(str(folder))
    assert copy is not None
    folder.rename(folder.with_name("other"))
    with pytest.raises(ConfigError, match=f"has no {folder}, which the server's machine has"):
        check_copy(copy)


def test_large_weights_are_compared_by_remembered_digests(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(copies_module, "SMALL_BYTES", 0)
    memory = DigestMemory(tmp_path / "memory", clock=lambda: 1 << 62)
    monkeypatch.setattr(copies_module, "user_memory", lambda: memory)
    unknown = copy_of(str(folder))
    assert unknown is not None
    assert unknown.digests == {}
    memory.put(FileState.of(folder / "model.safetensors"), "a" * 64)
    known = copy_of(str(folder))
    assert known is not None
    check_copy(unknown)
    memory.put(FileState.of(folder / "model.safetensors"), "b" * 64)
    with pytest.raises(ConfigError, match=r"model\.safetensors has other contents"):
        check_copy(known)


def test_whole_copies_differ_in_a_byte_that_no_sample_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(copies_module, "SMALL_BYTES", 1 << 10)
    memory = DigestMemory(tmp_path / "memory")
    monkeypatch.setattr(copies_module, "user_memory", lambda: memory)
    size = 4 * copies_module.PIECES * copies_module.PIECE_BYTES
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(size))
    sampled, whole = copy_of(str(folder)), copy_of(str(folder), is_whole=True)
    assert sampled is not None
    assert whole is not None
    assert set(whole.digests) == set(whole.sizes)
    check_copy(whole, is_whole=True)
    with weights.open("r+b") as file:
        file.seek(2 * copies_module.PIECE_BYTES)
        file.write(b"1")
    check_copy(sampled)
    with pytest.raises(ConfigError, match=r"model\.safetensors has other contents"):
        check_copy(whole, is_whole=True)


def test_a_file_that_changes_while_it_is_read_is_no_copy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(copies_module, "file_digest", lambda *_: None)
    with pytest.raises(ConfigError, match="changes while it is read"):
        copy_of(str(folder), is_whole=True)


def test_all_parts_of_a_gguf_file_are_compared(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(b"GGUF%d" % number)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    copy = copy_of(str(tmp_path / "m-00001-of-00002.gguf"))
    assert copy is not None
    assert set(copy.sizes) == {"m-00001-of-00002.gguf", "m-00002-of-00002.gguf"}
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"GGUF3")
    with pytest.raises(ConfigError, match=r"m-00002-of-00002\.gguf has other contents"):
        check_copy(copy)


def test_only_folders_of_the_server_are_compared(folder: Path) -> None:
    models = (ModelConfig(), ModelConfig(path="org/name"), ModelConfig(path=str(folder)))
    assert [copy.path for copy in copies_of(EngineConfig(models=models))] == [str(folder)]
    draft = SpeculativeConfig(method="draft_model", model=str(folder))
    assert [copy.path for copy in copies_of(EngineConfig(speculative=draft))] == [str(folder)]
