"""Folders and hub ids: which of both a path is, and which of them requests may name."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from mlx_parallm.types.errors import InvalidRequestError, ModelLoadError

# _HUB_ID is an owner and a name; a few models have no owner.
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)?\w[\w.-]*", re.ASCII)
MAX_NAME = 256
#: ``GGUF``: how names of GGUF files end, the only files that are models.
GGUF = ".gguf"
#: ``GGUF_PART``: the names of the files of a split one, which its first file stands for.
GGUF_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
#: ``GGUF_MAGIC``: their first bytes.
GGUF_MAGIC = b"GGUF"
# DOTS: parts of a path that clients and proxies resolve: /v1/adapters/.. would be another route.
DOTS = frozenset({".", ".."})


def is_hub_id(name: str, *, with_owner: bool = True) -> bool:
    """True if a name has the form of a hub id; ``with_owner`` refuses names without an owner."""
    return _HUB_ID.fullmatch(name) is not None and ("/" in name or not with_owner)


def check_folder(path: str) -> Path | None:
    """Return the folder or GGUF file that a path names; None if it can only be a hub id.

    Raises:
        ModelLoadError: it is another file, or written as a path, and there is nothing.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() or is_gguf(folder):
        return folder
    if folder.exists():
        raise ModelLoadError(
            f"{path} is a file; a model is a folder with config.json and weights, or a GGUF file."
        )
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelLoadError(f"There is no folder {path}.")
    return None


def is_gguf(path: Path) -> bool:
    """True if a path is a GGUF file by its name or, as Ollama's files are, by its first bytes."""
    if path.suffix == GGUF or not path.is_file():
        return path.is_file()
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def is_spelled(
    name: str, root: Path, list_names: Callable[[Path], Iterable[str]] = os.listdir
) -> bool:
    """True unless the folders on an existing path list what it names by other names.

    A file system that ignores case, or how an accent is composed, finds one folder by several
    names, which would be several models or adapters of one content. Where a folder may be entered
    but not listed, any name that it finds is right.

    Args:
        name: the path from ``root``, with slashes and no dots.
        root: the folder.
        list_names: returns the names in a folder.
    """
    folder = root
    for part in name.split("/"):
        if part in ("", ".", "..") or _has_other_name(part, folder, list_names):
            return False
        folder /= part
    return True


def _has_other_name(part: str, folder: Path, list_names: Callable[[Path], Iterable[str]]) -> bool:
    try:
        listed = set(list_names(folder))
    except OSError:
        return False
    alike = [each for each in listed if _folded(each) == _folded(part)]
    return bool(alike) and part not in {_typed(each, listed, folder) for each in alike}


def _typed(name: str, listed: Collection[str], folder: Path) -> str:
    """Return a listed name as it is typed, if the folder finds it so.

    HFS+ lists decomposed characters, and APFS lists what the folder was made with; both find it by
    composed characters too, which keyboards send.
    """
    composed = unicodedata.normalize("NFC", name)
    is_another = composed in listed or not os.path.lexists(folder / composed)
    return name if is_another else composed


def _folded(name: str) -> str:
    """Return what is equal for names that some file system does not distinguish."""
    decomposed = unicodedata.normalize("NFD", name)
    return unicodedata.normalize("NFD", decomposed.casefold())


class Confinement:
    """Folders below some roots, and hub ids that match some patterns."""

    def __init__(
        self, roots: Iterable[str], repos: Sequence[str], bases: Sequence[Path] | None = None
    ) -> None:
        """Confine requests.

        Args:
            roots: folders below which paths may lead.
            repos: patterns of hub ids, as ``fnmatch`` takes them.
            bases: folders that relative paths start from; None for the roots.
        """
        self.roots = [Path(root).resolve() for root in roots]
        self._bases = self.roots if bases is None else bases
        self._repos = repos

    def folders(self, path: str, *, param: str) -> list[Path]:
        """Return where a path may lead, whether there is a folder or not; none if it is refused.

        Raises:
            InvalidRequestError: the path, the value of ``param``, contains a NUL.
        """
        if "\0" in path:
            raise InvalidRequestError("A path must not contain a NUL character.", param=param)
        # An absolute path replaces the base. A symbolic link counts as the folder it leads to.
        folders = dict.fromkeys((base / path).resolve() for base in self._bases)
        return [
            folder for folder in folders if any(folder.is_relative_to(root) for root in self.roots)
        ]

    def allows_repo(self, name: str, *, with_owner: bool = True) -> bool:
        """True if a name has the form of a hub id and may be loaded from there."""
        is_id = len(name) <= MAX_NAME and is_hub_id(name, with_owner=with_owner)
        return is_id and any(fnmatchcase(name, repo) for repo in self._repos)


def check_name(name: str, *, param: str = "name") -> None:
    """Refuse a name that could not be written in a path, a line of a log, or a list.

    Raises:
        InvalidRequestError: it is empty or too long, has characters that cannot be printed, or a
            part that is "." or "..".
    """
    if not name or len(name) > MAX_NAME:
        raise InvalidRequestError(f"A name must have 1 to {MAX_NAME} characters.", param=param)
    if not name.isprintable():
        raise InvalidRequestError("A name must have printable characters only.", param=param)
    if DOTS & set(name.split("/")):
        raise InvalidRequestError('No part of a name can be "." or "..".', param=param)
