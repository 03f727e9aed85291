"""Changes of a server in JSON and safetensors, which is what servers of a fleet send each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from mlx_parallm.adapters.safetensors import (
    FLOATS,
    MODEL_DTYPES,
    read_safetensors,
    write_file,
)
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterLayout, LowRankLayout, join_adapter, split_adapter
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
from mlx_parallm.models.checkpoints.copies import Copy, check_copy, copy_of
from mlx_parallm.replicas import entries
from mlx_parallm.replicas.entries import Head
from mlx_parallm.replicas.host import Content
from mlx_parallm.replicas.member import content_digest
from mlx_parallm.types.errors import ConfigError, ConflictError, InvalidRequestError
from mlx_parallm.types.request import DEFAULT_VERSION

PARAM = "entry"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A change for peers: JSON, and the bytes of a safetensors file with their SHA-256."""

    head: Head
    content: Content | None = None
    digest: str | None = None

    @property
    def is_labelled(self) -> bool:
        """True if the change makes a version."""
        return self.head["kind"] in (entries.LOAD_ADAPTER, entries.UPDATE_WEIGHTS)


def encode(change: ServerChange[Any], folders: Folders) -> Encoded:
    """Return a change for peers. It takes long if the change has tensors, or a folder.

    Raises:
        InvalidRequestError, NotFoundError: it loads what this server may not load.
        ConflictError: a folder changes while it is read.
    """
    match change:
        case LoadAdapter(upload, model, evicted):
            return _encode_adapter(upload, model, evicted)
        case ReplaceWeights(model, update):
            return _encode_update(update, model)
        case LoadModel(load):
            return Encoded(_encode_load(load, folders.loaded(load)))
        case _:
            return Encoded(_encode_plain(change))


def _encode_plain(change: ServerChange[Any]) -> Head:
    """Return the head of a change without tensors and folders."""
    match change:
        case RemoveAdapter(name):
            return {"kind": entries.UNLOAD_ADAPTER, "name": name}
        case LabelWeights(model, label):
            return {"kind": entries.LABEL_WEIGHTS, "model": model, "version": label}
        case PauseServer(mode, clear_cache):
            return {"kind": entries.PAUSE, "mode": mode.value, "clear_cache": clear_cache}
        case ResumeServer():
            return {"kind": entries.RESUME}
        case EmptyCaches(running, external):
            kind = entries.EMPTY_CACHES
            return {"kind": kind, "reset_running": running, "reset_external": external}
        case SleepServer(level, mode):
            return {"kind": entries.SLEEP, "level": level, "mode": mode.value}
        case WakeServer(tags):
            return {"kind": entries.WAKE, "tags": list(tags)}
        case UnloadModel(name):
            return {"kind": entries.UNLOAD_MODEL, "name": name}
        case _:
            raise NotImplementedError(type(change).__name__)


def _encode_adapter(upload: AdapterUpload, model: str, evicted: str | None) -> Encoded:
    layout, tensors = split_adapter(upload.weights)
    turned = [name for name, tensor in tensors.items() if tensor.is_turned]
    # The order of the numbers in memory is part of an adapter's identity.
    stored = {
        name: tensor.transposed() if tensor.is_turned else tensor
        for name, tensor in tensors.items()
    }
    head = {
        "kind": entries.LOAD_ADAPTER,
        "name": upload.name,
        "model": model,
        "version": upload.version,
        "expected_version": upload.expected_version,
        "replaces": upload.replaces,
        "is_pinned": upload.is_pinned,
        "evicted": evicted,
        "source": upload.source,
        "layout": asdict(layout),
        "turned": turned,
        "digest": upload.weights.digest,
    }
    return _with_content(head, write_file(stored, {}))


def _encode_update(update: WeightsUpdate, model: str) -> Encoded:
    head = {
        "kind": entries.UPDATE_WEIGHTS,
        "model": model,
        "version": update.version,
        "expected_version": update.expected_version,
        "folder": None if update.folder is None else str(update.folder),
        "copy": None if update.folder is None else _encode_copy(update.folder),
        "names": sorted(update.tensors or ()),
    }
    return _with_content(head, write_file(update.tensors, {})) if update.tensors else Encoded(head)


def _with_content(head: Head, content: bytes) -> Encoded:
    return Encoded(head, content, content_digest(content))


def _encode_copy(folder: Path) -> Mapping[str, Any] | None:
    try:
        # A sample may miss what differs, and then one label has two contents.
        copy = copy_of(str(folder), is_whole=True)
    except ConfigError as problem:
        raise ConflictError(str(problem)) from None
    return None if copy is None else asdict(copy)


def _encode_load(load: ModelLoad, folder: Path | None) -> Head:
    head = {**asdict(load), "copy": None if folder is None else _encode_copy(folder)}
    if load.ttl_s is not None and math.isinf(load.ttl_s):
        # JSON has no infinity.
        head["ttl_s"] = -1
    return {"kind": entries.LOAD_MODEL, "name": (load.names or (load.model,))[0], **head}


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of a server.

    Attributes:
        allowed: returns the folder of a path, or raises if this server may not read it.
        own: returns the folder that a model is loaded from; None if it is not known.
        loaded: returns the folder or file that a load would read; None if it is not on this disk.
    """

    allowed: Callable[[str], Path]
    own: Callable[[str], Path | None]
    loaded: Callable[[ModelLoad], Path | None]


def decode(head: Head, content: Content | None, folders: Folders) -> ServerChange[Any]:
    """Return the change of a head and its tensors, for a server with these folders.

    It takes as long as ``encode``.

    Raises:
        InvalidRequestError, NotFoundError: it is none, or its folder is not here.
        ConflictError: its folder has another content here.
    """
    try:
        if head["kind"] == entries.UPDATE_WEIGHTS:
            return _decode_update(head, content, folders)
        if head["kind"] == entries.BASE_WEIGHTS:
            return _base_weights(_text(head, "model"), folders)
        if head["kind"] == entries.LOAD_ADAPTER:
            upload = _decode_upload(head, content or b"")
            return LoadAdapter(upload, _text(head, "model"), head["evicted"])
        if head["kind"] == entries.LOAD_MODEL:
            return LoadModel(_decode_load(head, folders))
        return _PLAIN[head["kind"]](head)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise InvalidRequestError(
            f"This is no change of a fleet: {type(problem).__name__}.", param=PARAM
        ) from problem


def _decode_upload(head: Head, content: Content) -> AdapterUpload:
    tensors = read_safetensors(content, param=PARAM, dtypes=FLOATS)
    for name in head["turned"]:
        tensors[name] = tensors[name].transposed()
    weights = join_adapter(_layout(head["layout"]), tensors)
    if weights.digest != head["digest"]:
        raise InvalidRequestError("The adapter has another digest than the change says.")
    return AdapterUpload(
        name=_text(head, "name"),
        weights=weights,
        version=head["version"],
        expected_version=head["expected_version"],
        replaces=bool(head["replaces"]),
        is_pinned=head["is_pinned"],
        source=head["source"],
    )


def _layout(value: Mapping[str, Any]) -> AdapterLayout:
    modules = {path: LowRankLayout(**module) for path, module in value["modules"].items()}
    rest = {"saved": tuple(value["saved"]), "copies": tuple(value["copies"])}
    return AdapterLayout(**{**value, **rest, "modules": modules})


def _decode_update(head: Head, content: Content | None, folders: Folders) -> ReplaceWeights:
    update = WeightsUpdate(version=head["version"], expected_version=head["expected_version"])
    if head["folder"] is None:
        body = content or b""
        tensors: dict[str, HostTensor] = read_safetensors(body, param=PARAM, dtypes=MODEL_DTYPES)
        if sorted(tensors) != list(head["names"]):
            raise InvalidRequestError("The tensors are others than the change names.", param=PARAM)
        update = replace(update, tensors=tensors)
        digest = known_digest(content_digest(body))
        return ReplaceWeights(_text(head, "model"), update, digest)
    folder = folders.allowed(_text(head, "folder"))
    _check_copy(head, folder)
    return ReplaceWeights(_text(head, "model"), replace(update, folder=folder))


def _check_copy(head: Head, folder: Path) -> None:
    """Raise ConflictError if a folder has other files here than where the change came from."""
    try:
        check_copy(replace(Copy(**head["copy"]), path=str(folder)), is_whole=True)
    except ConfigError as problem:
        raise ConflictError(str(problem)) from None


def _base_weights(model: str, folders: Folders) -> ReplaceWeights:
    folder = folders.own(model)
    if folder is None:
        raise ConflictError(
            f"The weights that {model} began with cannot be read again here: restart this server."
        )
    return ReplaceWeights(model, WeightsUpdate(folder=folder, version=DEFAULT_VERSION))


def known_digest(digest: str) -> Future[str | None]:
    """Return the digest of tensors as an update takes it; all servers give them the same one."""
    known: Future[str | None] = Future()
    known.set_result(digest)
    return known


def _decode_load(head: Head, folders: Folders) -> ModelLoad:
    fields = {name: head[name] for name in ModelLoad.__dataclass_fields__ if name in head}
    if "names" in fields:
        fields["names"] = tuple(fields["names"])
    if fields.get("ttl_s") == -1:
        fields["ttl_s"] = math.inf
    load = ModelLoad(**fields)
    folder = None if head.get("copy") is None else folders.loaded(load)
    # A model of the hub that is not here yet is downloaded by the same name.
    if folder is not None:
        _check_copy(head, folder)
    return load


def _text(head: Head, name: str) -> str:
    value = head[name]
    if not isinstance(value, str):
        raise TypeError(name)
    return cast("str", value)


# _PLAIN: make changes without tensors and folders of heads.
_PLAIN: Mapping[str, Callable[[Head], ServerChange[Any]]] = {
    entries.UNLOAD_ADAPTER: lambda head: RemoveAdapter(_text(head, "name"), may_lack=True),
    entries.LABEL_WEIGHTS: lambda head: LabelWeights(_text(head, "model"), _text(head, "version")),
    entries.PAUSE: lambda head: PauseServer(PauseMode(head["mode"]), bool(head["clear_cache"])),
    entries.RESUME: lambda _: ResumeServer(),
    entries.EMPTY_CACHES: lambda head: EmptyCaches(
        bool(head["reset_running"]), bool(head["reset_external"])
    ),
    entries.SLEEP: lambda head: SleepServer(int(head["level"]), PauseMode(head["mode"])),
    entries.WAKE: lambda head: WakeServer([str(tag) for tag in head["tags"]]),
    entries.UNLOAD_MODEL: lambda head: UnloadModel(_text(head, "name")),
}
