"""Changes in JSON and safetensors mean the same at another server, and nothing else is one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.engine import changes
from mlx_parallm.engine.changes import (
    EmptyCaches,
    LabelWeights,
    LoadAdapter,
    LoadModel,
    PauseMode,
    PauseServer,
    RemoveAdapter,
    ReplaceWeights,
    ResumeServer,
    ServerChange,
    SleepServer,
    UnloadModel,
    WakeServer,
)
from mlx_parallm.engine.kind import ModelLoad
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.models.checkpoints.copies import SMALL_BYTES
from mlx_parallm.replicas.codec import Folders, decode, encode
from mlx_parallm.replicas.entries import Entry
from mlx_parallm.replicas.frames import FrameReader, pack_head
from mlx_parallm.types.errors import ConflictError, InvalidRequestError, NotFoundError
from tests import adapter_files


def here(path: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise NotFoundError("There is no such folder.")
    return folder


def loaded(load: ModelLoad) -> Path | None:
    folder = Path(load.model)
    return folder if folder.is_dir() else None


FOLDERS = Folders(here, lambda _: None, loaded)


def an_adapter() -> LoadAdapter:
    tensors = read_safetensors(adapter_files.upload(3), param="x")
    weights = read_adapter(adapter_files.CONFIG, tensors, param="x")
    upload = AdapterUpload(name="a", weights=weights, version="v", replaces=True, is_pinned=True)
    return LoadAdapter(upload, "m")


def an_update() -> ReplaceWeights:
    tensors = {
        "w": HostTensor(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "b": HostTensor(np.arange(4, dtype=np.uint16), is_bfloat16=True),
        "packed": HostTensor(np.arange(4, dtype=np.uint32)),
    }
    return ReplaceWeights("m", WeightsUpdate(tensors=tensors, expected_version="1"))


PLAIN: list[ServerChange[Any]] = [
    LabelWeights("m", "label"),
    PauseServer(PauseMode.WAIT, clear_cache=True),
    ResumeServer(),
    EmptyCaches(reset_running=True, reset_external=False),
    SleepServer(2, PauseMode.KEEP),
    WakeServer(["weights"]),
    LoadModel(ModelLoad(model="org/m", names=("x", "y"), is_pinned=True, ttl_s=math.inf)),
    LoadModel(ModelLoad(model="m")),
    UnloadModel("x"),
]


def sent(change: ServerChange[Any]) -> tuple[dict[str, Any], bytes | None]:
    """Return head and tensors of a change as another server receives them."""
    encoded = encode(change, FOLDERS)
    content = None if encoded.content is None else "digest"
    entry = Entry(3, "parent", encoded.head, content, "http://a:1")
    received, body = unpack(pack_head(entry) + (encoded.content or b""))
    assert received.digest == entry.digest
    return dict(received.head), body


def unpack(body: bytes, piece_bytes: int = 7) -> tuple[Entry, Any]:
    """Return a change that comes in pieces."""
    frame = FrameReader()
    for start in range(0, len(body), piece_bytes):
        frame.feed(body[start : start + piece_bytes])
    return frame.finish()


@pytest.mark.parametrize("piece_bytes", [1, 3, 4, 5, 1000])
def test_frames_come_in_any_pieces(piece_bytes: int) -> None:
    entry = Entry(1, "", {"kind": "resume"}, "digest", "http://a:1")
    received, content = unpack(pack_head(entry) + b"tensors", piece_bytes)
    assert (received, bytes(content)) == (entry, b"tensors")


@pytest.mark.parametrize("change", PLAIN, ids=lambda change: type(change).__name__)
def test_changes_without_tensors_arrive(change: ServerChange[Any]) -> None:
    assert decode(*sent(change), FOLDERS) == change


def test_every_change_is_tried() -> None:
    kinds = {
        kind
        for kind in vars(changes).values()
        if isinstance(kind, type) and ServerChange in kind.__mro__[1:]
    }
    assert kinds == {LoadAdapter, ReplaceWeights, RemoveAdapter, *map(type, PLAIN)}


def test_an_adapter_arrives_with_its_identity() -> None:
    change = an_adapter()
    arrived = decode(*sent(change), FOLDERS)
    assert isinstance(arrived, LoadAdapter)
    assert arrived.upload.content == change.upload.content
    for path, module in change.upload.weights.modules.items():
        other = arrived.upload.weights.modules[path]
        assert np.array_equal(other.a.array, module.a.array)
        assert (other.a.stored()[1], other.scale) == (module.a.stored()[1], module.scale)
    facts = ("name", "version", "expected_version", "replaces", "is_pinned", "source")
    for name in facts:
        assert getattr(arrived.upload, name) == getattr(change.upload, name)


def test_an_adapter_of_another_digest_is_refused() -> None:
    head, content = sent(an_adapter())
    with pytest.raises(InvalidRequestError, match="another digest"):
        decode({**head, "digest": "0" * 64}, content, FOLDERS)


def test_a_missing_adapter_is_no_fault_of_a_peer() -> None:
    assert decode(*sent(RemoveAdapter("a")), FOLDERS) == RemoveAdapter("a", may_lack=True)


def test_tensors_arrive() -> None:
    change = an_update()
    arrived = decode(*sent(change), FOLDERS)
    assert isinstance(arrived, ReplaceWeights)
    before, after = change.update.tensors, arrived.update.tensors
    assert before is not None
    assert after is not None
    for name, tensor in before.items():
        assert after[name].checksum() == tensor.checksum()
    assert arrived.digest is not None
    assert arrived.digest.done()


def test_a_folder_is_read_at_each_server_if_it_is_the_same(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(SMALL_BYTES + 1)
    change = ReplaceWeights("m", WeightsUpdate(folder=tmp_path, version="1"))
    head, content = sent(change)
    assert decode(head, content, FOLDERS) == change
    with (tmp_path / "model.safetensors").open("r+b") as file:
        # No sample has this byte.
        file.seek(100_000)
        file.write(b"\1")
    with pytest.raises(ConflictError, match="has other contents"):
        decode(head, content, FOLDERS)
    with pytest.raises(NotFoundError):
        decode({**head, "folder": str(tmp_path / "none")}, content, FOLDERS)


def test_a_model_is_loaded_at_each_server_from_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    change = LoadModel(ModelLoad(model=str(tmp_path)))
    head, content = sent(change)
    assert decode(head, content, FOLDERS) == change
    # A model of the hub that this server has not downloaded.
    assert decode({**head, "model": "org/m"}, content, FOLDERS) == LoadModel(
        ModelLoad(model="org/m")
    )
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConflictError, match="has other contents"):
        decode(head, content, FOLDERS)


@pytest.mark.parametrize("kind", ["load_adapter", "update_weights", "pause", "wake", "load_model"])
@pytest.mark.parametrize("value", [None, 3, "text", [], {}])
def test_heads_with_wrong_fields_are_refused(kind: str, value: object) -> None:
    by_kind = {
        encode(change, FOLDERS).head["kind"]: sent(change) for change in (an_adapter(), an_update())
    }
    by_kind |= {encode(change, FOLDERS).head["kind"]: sent(change) for change in PLAIN}
    head, content = by_kind[kind]
    for name in set(head) - {"kind"}:
        broken = {key: field for key, field in head.items() if key != name}
        try:
            decode(json.loads(json.dumps({**broken, name: value})), content, FOLDERS)
        except InvalidRequestError:
            continue


@pytest.mark.parametrize("kind", ["", "evil", "__class__"])
def test_unknown_kinds_are_refused(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match="no change of a fleet"):
        decode({"kind": kind}, None, FOLDERS)


@pytest.mark.parametrize("content", [None, b"", b"garbage", b"\x80\x04pickle"])
def test_bodies_that_are_no_safetensors_are_refused(content: bytes | None) -> None:
    for change in (an_adapter(), an_update()):
        with pytest.raises(InvalidRequestError):
            decode(encode(change, FOLDERS).head, content, FOLDERS)


@pytest.mark.parametrize(
    "body", [b"", b"\1", b"\2\0\0\0{", b"\2\0\0\0[]", b"\2\0\0\0{}", b"\xff\xff\xff\xff" + bytes(9)]
)
def test_frames_that_are_cut_off_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        unpack(body)
