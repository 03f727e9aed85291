from __future__ import annotations

import os

import pytest

from mlx_parallm.media.local_files import LocalFiles
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "allowed"
    folder.mkdir()
    (folder / "an image.png").write_bytes(b"inside")
    (tmp_path / "outside.png").write_bytes(b"outside")
    return folder


def files_of(folder, **limits) -> LocalFiles:
    return LocalFiles(MediaLimits(allowed_local_path=str(folder), **limits))


def test_files_below_the_folder_are_read(folder):
    files = files_of(folder)
    assert files.read(f"file://{folder}/an%20image.png") == b"inside"
    assert files.read(f"file://localhost{folder}/an%20image.png") == b"inside"
    assert files.read(f"file:{folder}/x/../an image.png") == b"inside"


def test_links_are_judged_by_where_they_lead(folder, tmp_path):
    (folder / "in.png").symlink_to(folder / "an image.png")
    (folder / "out.png").symlink_to(tmp_path / "outside.png")
    (folder / "folder").symlink_to(tmp_path)
    (folder / "circle").symlink_to(folder / "circle")
    files = files_of(folder)
    assert files.read(f"file://{folder}/in.png") == b"inside"
    for path in ("out.png", "folder/outside.png", "circle"):
        with pytest.raises(InvalidRequestError, match="no such file"):
            files.read(f"file://{folder}/{path}")


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "file:etc/passwd",
        "file:",
        "file://",
        "file://host/etc/passwd",
        "file://{folder}/../outside.png",
        "file://{folder}/%2e%2e/outside.png",
        "file://{folder}/..%2foutside.png",
        "file://{folder}",
        "file://{folder}/missing.png",
        "file://{folder}/an%20image.png?x",
        "file://{folder}/an%20image.png%00",
        "file://{folder}/%ff",
        "file://[{folder}",
        "file:///" + "a" * 5000,
    ],
)
def test_other_urls_are_refused_in_the_same_words(folder, url):
    with pytest.raises(InvalidRequestError) as refused:
        files_of(folder).read(url.replace("{folder}", str(folder)))
    assert "outside" not in str(refused.value)


def test_pipes_and_devices_are_refused(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(InvalidRequestError, match="no such file"):
        files_of(folder).read(f"file://{folder}/pipe")
    with pytest.raises(InvalidRequestError, match="no such file"):
        files_of("/dev").read("file:///dev/zero")


def test_large_files_are_refused(folder):
    url = f"file://{folder}/an%20image.png"
    assert files_of(folder, max_bytes=6).read(url) == b"inside"
    with pytest.raises(InvalidRequestError, match="larger than 5 bytes"):
        files_of(folder, max_bytes=5).read(url)


def test_no_file_is_read_by_default(folder):
    with pytest.raises(InvalidRequestError, match="allowed-local-media-path"):
        LocalFiles(MediaLimits()).read(f"file://{folder}/an%20image.png")
