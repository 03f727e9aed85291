"""Files of the hub are continued where they ended, and checked before they are there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from huggingface_hub.errors import GatedRepoError

from mlx_parallm.cli.models.hub_files import TRIES, BlobFolder, HubFile
from mlx_parallm.types.errors import ModelLoadError
from tests.fake_hub import COMMIT, LARGE, FakeHub, digest_of, serve_hub

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
FILES = {WEIGHTS: hashlib.sha256(b"weights").digest() * 10_000, CONFIG: b'{"model_type": "llama"}'}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve_hub(FakeHub({"org/tiny": FILES})) as served:
        yield served


def listed(hub: FakeHub, name: str) -> HubFile:
    url = f"{hub.url}/org/tiny/resolve/{COMMIT}/{name}"
    data = FILES[name]
    return HubFile(name, url, len(data), digest_of(name, data), name.endswith(LARGE))


class Blobs(BlobFolder):
    """A folder that waits for nothing, and counts."""

    def __init__(self, folder: Path) -> None:
        self.num_bytes = 0
        self.num_waits = 0
        self.folder = folder
        super().__init__(folder, self._add, self._do_not_wait)

    def _add(self, count: int) -> None:
        self.num_bytes += count

    def _do_not_wait(self, _seconds: float) -> None:
        self.num_waits += 1

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_off_three_times_is_continued(
    hub: FakeHub, blobs: Blobs, name: str
) -> None:
    hub.num_breaks[name] = 3
    file = listed(hub, name)
    blobs.fetch([file])
    assert (blobs.folder / file.digest).read_bytes() == FILES[name]
    assert blobs.names() == {file.digest}
    assert blobs.num_bytes == file.size
    first, *others = hub.ranges[name]
    starts = [int((each or "0").removeprefix("bytes=").rstrip("-")) for each in others]
    assert first is None
    assert len(others) == blobs.num_waits == 3
    assert 0 < starts[0] < starts[1] < starts[2] < file.size


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_what_another_process_has_fetched_serves(
    hub: FakeHub, blobs: Blobs, ignores_ranges: bool
) -> None:
    hub.ignores_ranges = ignores_ranges
    file = listed(hub, WEIGHTS)
    blobs.folder.mkdir()
    partial = blobs.folder / f"{file.digest}.incomplete"
    partial.write_bytes(FILES[WEIGHTS][:1000])
    assert blobs.missing_bytes([file]) == file.size - 1000
    blobs.fetch([file])
    assert hub.ranges[WEIGHTS] == ["bytes=1000-"]
    assert blobs.num_bytes == file.size
    assert blobs.missing_bytes([file]) == 0
    assert (blobs.folder / file.digest).read_bytes() == FILES[WEIGHTS]


def changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("form", ["changed", "longer"])
def test_a_content_of_another_digest_is_refused_and_removed(
    hub: FakeHub, blobs: Blobs, name: str, form: str
) -> None:
    hub.sent[name] = changed(FILES[name]) if form == "changed" else FILES[name] + b"more"
    with pytest.raises(ModelLoadError, match=f"{name}: .* another digest"):
        blobs.fetch([listed(hub, name)])
    assert blobs.names() == set()


@pytest.mark.parametrize("data", [changed(FILES[WEIGHTS]), FILES[WEIGHTS] + b"more"])
def test_what_cannot_be_continued_is_fetched_anew(hub: FakeHub, blobs: Blobs, data: bytes) -> None:
    file = listed(hub, WEIGHTS)
    blobs.folder.mkdir()
    (blobs.folder / f"{file.digest}.incomplete").write_bytes(data)
    blobs.fetch([file])
    assert blobs.names() == {file.digest}
    assert hub.ranges[WEIGHTS] == [None]
    assert blobs.num_bytes == file.size


def test_a_damaged_content_of_the_cache_is_replaced(hub: FakeHub, blobs: Blobs) -> None:
    file = listed(hub, WEIGHTS)
    blobs.folder.mkdir()
    (blobs.folder / file.digest).write_bytes(changed(FILES[WEIGHTS]))
    blobs.fetch([file])
    assert (blobs.folder / file.digest).read_bytes() == FILES[WEIGHTS]
    assert blobs.num_bytes == file.size


def test_what_is_there_is_not_fetched_again(hub: FakeHub, blobs: Blobs) -> None:
    files = [listed(hub, name) for name in FILES]
    blobs.fetch(files)
    blobs.fetch(files)
    assert hub.ranges == {name: [None] for name in FILES}


def test_a_hub_that_sends_nothing_is_given_up(hub: FakeHub, blobs: Blobs) -> None:
    hub.sent[WEIGHTS] = b""
    with pytest.raises(ModelLoadError, match="sends a part"):
        blobs.fetch([listed(hub, WEIGHTS)])
    assert blobs.num_waits == TRIES - 1


def test_a_hub_that_is_gone_is_given_up_and_what_came_stays(hub: FakeHub, blobs: Blobs) -> None:
    file = listed(hub, WEIGHTS)
    blobs.folder.mkdir()
    partial = blobs.folder / f"{file.digest}.incomplete"
    partial.write_bytes(FILES[WEIGHTS][:1000])
    absent = HubFile(WEIGHTS, "http://127.0.0.1:9/x", file.size, file.digest, file.is_large)
    with pytest.raises(httpx2.ConnectError):
        blobs.fetch([absent])
    assert partial.stat().st_size == 1000


def test_a_file_that_is_refused_is_not_tried_again(hub: FakeHub, blobs: Blobs) -> None:
    hub.refused_files[WEIGHTS] = 403
    with pytest.raises(GatedRepoError):
        blobs.fetch([listed(hub, name) for name in FILES])
    assert blobs.num_waits == 0
