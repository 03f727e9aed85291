"""Fetches and unpacks the sources into a cache folder outside the repository."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin

from tests.corpus.sources import Source

INDEX = "https://pypi.org/simple"
# JSON_INDEX: the form of the index that has digests (https://peps.python.org/pep-0691/).
JSON_INDEX = "application/vnd.pypi.simple.v1+json"
CHUNK_BYTES = 1 << 20


def cache_folder() -> Path:
    """Return the folder of what was fetched, which ``MLX_PARALLM_CORPUS`` may name."""
    named = os.environ.get("MLX_PARALLM_CORPUS")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else base / "mlx-parallm" / "corpus"


def unpacked(source: Source) -> Path:
    """Return the folder of a source's files; fetch them if they are not there.

    Raises:
        ValueError: the index has no such archive, or another one of its name.
        OSError: it cannot be reached.
    """
    cache = cache_folder()
    folder = cache / source.key
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        archive = Path(temporary) / source.archive
        download(source, archive)
        files = Path(temporary) / "files"
        files.mkdir()
        extract(archive, source.members, files)
        try:
            files.rename(folder)
        except OSError:
            # Another process was faster.
            if not folder.exists():
                raise
    return folder


def download(source: Source, target: Path) -> None:
    """Write the archive to a file.

    Raises:
        ValueError: its digest is not the pinned one.
    """
    digest = hashlib.sha256()
    with urllib.request.urlopen(_url(source)) as answer, target.open("wb") as file:
        while chunk := answer.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != source.sha256:
        raise ValueError(f"{source.archive} has the digest {digest.hexdigest()}, not the pinned.")


def project_page(name: str) -> str:
    """Return the address of a package's list of files; ``PIP_INDEX_URL`` may name the index."""
    return f"{(os.environ.get('PIP_INDEX_URL') or INDEX).rstrip('/')}/{name}/"


def _url(source: Source) -> str:
    page = project_page(source.name)
    request = urllib.request.Request(page, headers={"Accept": JSON_INDEX})
    with urllib.request.urlopen(request) as answer:
        files = json.load(answer)["files"]
    for file in files:
        if file["filename"] == source.archive:
            return urljoin(page, file["url"])
    raise ValueError(f"{page} has no {source.archive}.")


def extract(archive: Path, patterns: tuple[str, ...], folder: Path) -> None:
    """Unpack the files that match a pattern, without the archive's own folder."""
    with tarfile.open(archive) as tar:
        for member, name in _chosen(tar, patterns):
            content = tar.extractfile(member)
            assert content is not None, "only plain files are chosen"
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(content, file)


def _chosen(
    tar: tarfile.TarFile, patterns: tuple[str, ...]
) -> Iterator[tuple[tarfile.TarInfo, str]]:
    """Yield plain files whose names match and stay within the folder."""
    for member in tar:
        _, _, name = member.name.partition("/")
        path = PurePosixPath(name)
        stays = not path.is_absolute() and ".." not in path.parts
        if member.isfile() and stays and any(path.match(pattern) for pattern in patterns):
            yield member, name
