"""Fetches and unpacks the sources into a cache folder outside the repository."""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin

from mlx_parallm.peers import child_process
from tests.corpus.sources import Source

INDEX = "https://pypi.org/simple"
# ACCEPTED: forms of the index (https://peps.python.org/pep-0691/).
ACCEPTED = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
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
    """Return the address of a package's list of files, on the index that pip uses."""
    index = os.environ.get("PIP_INDEX_URL") or _configured_index() or INDEX
    return f"{index.rstrip('/')}/{name}/"


def _configured_index() -> str:
    """Return the index of pip's configuration; empty if it names none."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    done = child_process.run(
        [child_process.COMMAND, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return done.stdout.decode().strip() if done.returncode == 0 else ""


def _url(source: Source) -> str:
    page = project_page(source.name)
    request = urllib.request.Request(page, headers={"Accept": ACCEPTED})
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    for name, url in _files(text):
        if name == source.archive:
            return urljoin(page, url)
    raise ValueError(f"{page} has no {source.archive}.")


def _files(page: str) -> Iterator[tuple[str, str]]:
    """Yield the files of a package and their addresses, from JSON or from HTML."""
    if page.lstrip().startswith("{"):
        yield from ((file["filename"], file["url"]) for file in json.loads(page)["files"])
        return
    for url, name in re.findall(r'<a[^>]*href="([^"]+)"[^>]*>\s*([^<]+?)\s*</a>', page):
        yield name, html.unescape(url).partition("#")[0]


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
