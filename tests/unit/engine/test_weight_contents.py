"""Contents of a model's weights over updates, sleep, and an engine that is started anew."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.engine.live_weights import LiveWeights, WeightsHistory, WeightsUpdate
from mlx_parallm.engine.policies import Policies
from mlx_parallm.models.checkpoints.contents import DigestMemory, FolderContents, SeenFolder
from mlx_parallm.types.content import updated_content
from mlx_parallm.types.request import WeightsVersion

OLD = 1_600_000_000


class FakeWeights:
    """Takes whatever comes; ``meanwhile`` happens while it reads a folder."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] = lambda: None

    def prepare_folder(self, folder: Path) -> None:
        self.meanwhile()

    def prepare_tensors(self, tensors: dict[str, HostTensor]) -> None:
        pass

    def commit(self) -> None:
        pass

    def drop_prepared(self) -> None:
        pass

    def sleep(self, level: int) -> None:
        pass

    def wake(self, tag: str) -> bool:
        if tag == "weights":
            self.meanwhile()
        return tag == "weights"


class FakeCache:
    def reset_prefix_cache(self, *, reset_running: bool) -> None:
        pass


class Server:
    """A model's weights, and their contents."""

    def __init__(self, folder: Path, memory: DigestMemory) -> None:
        self.contents = FolderContents(memory)
        self.weights = FakeWeights()
        self.live = LiveWeights(
            Policies("m"),
            cast(Any, self.weights),
            FakeCache(),
            contents=self.contents,
            read=self.contents.see(folder),
        )

    def find(self) -> str | None:
        """Return the lasting content once the thread has ended."""
        self.contents.join()
        return self.lasting

    @property
    def lasting(self) -> str | None:
        return self.live.policies.base.lasting.digest

    def load(self, folder: Path) -> str:
        """Update from a folder; return the content in this process."""
        return self.update(WeightsUpdate(folder=folder))

    def change(self, digest: str | None) -> str:
        """Update by tensors with a digest; return the content in this process."""
        return self.update(WeightsUpdate(tensors={"a": cast(Any, None)}), digest)

    def update(self, update: WeightsUpdate, digest: str | None = None) -> str:
        self.live.prepare(update)
        return self.live.commit(digest).content


def write(folder: Path, weights: bytes, time_s: int = OLD) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    file = folder / "model.safetensors"
    file.write_bytes(weights)
    os.utime(file, (time_s, time_s))
    return folder


@pytest.fixture
def memory(tmp_path: Path) -> DigestMemory:
    # Files that are written now have settled.
    return DigestMemory(tmp_path / "cache", lambda: time.time_ns() + 60 * 10**9)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / name, name.encode()) for name in "ab"]


@pytest.fixture
def server(folders: list[Path], memory: DigestMemory) -> Server:
    return Server(folders[0], memory)


def test_the_content_becomes_known_beside_the_weights_in_use(server: Server) -> None:
    assert (server.live.version, server.lasting) == (WeightsVersion(), None)
    server.live.begin_hashing()
    assert server.find() is not None
    assert server.live.version == WeightsVersion()


def test_a_folder_that_comes_back_has_its_content_again(
    server: Server, folders: list[Path], memory: DigestMemory
) -> None:
    first = server.load(folders[1])
    lasting = server.find()
    assert first != lasting is not None
    other = server.load(folders[0])
    assert server.find() not in (None, lasting)
    # It was hashed meanwhile, so it is known in time.
    assert server.load(folders[1]) == lasting == server.lasting
    assert server.load(folders[0]) not in (first, other, lasting)
    # A server that begins with it has the same.
    assert Server(folders[1], memory).lasting == lasting


def test_a_file_that_changed_in_place_is_other_weights(server: Server, folders: list[Path]) -> None:
    server.load(folders[1])
    before = server.find()
    server.load(folders[1])
    write(folders[1], b"c", OLD + 1)
    content = server.load(folders[1])
    assert content != before
    assert server.find() not in (None, before)


def test_a_folder_that_changes_while_it_is_read_has_no_remembered_content(
    server: Server, folders: list[Path]
) -> None:
    server.load(folders[1])
    before = server.find()
    server.weights.meanwhile = lambda: write(folders[1], b"c", OLD + 1)
    content = server.load(folders[1])
    assert content != before
    assert server.find() is None
    # It is hashed as soon as it is read without a change.
    server.weights.meanwhile = lambda: None
    assert server.load(folders[1]) != content
    assert server.find() not in (None, before)


def test_weights_that_change_while_they_are_read_again_have_no_content(
    server: Server, folders: list[Path]
) -> None:
    server.load(folders[1])
    server.find()
    contents = [server.load(folders[1])]
    server.weights.meanwhile = lambda: write(folders[1], b"c", OLD + len(contents))
    for _ in range(2):
        server.live.sleep(2)
        server.live.wake(["weights", "kv_cache"])
        assert server.find() is None
        assert server.live.version.content not in contents
        contents.append(server.live.version.content)


def test_tensors_have_the_content_of_all_that_came(server: Server) -> None:
    server.live.begin_hashing()
    base = server.find()
    assert base is not None
    first = server.change("one")
    assert server.lasting == updated_content(base, "one")
    second = server.change("two")
    assert server.lasting == updated_content(updated_content(base, "one"), "two")
    assert len({first, second, base, "", server.lasting}) == 5


def test_the_same_updates_have_the_same_contents(server: Server, folders: list[Path]) -> None:
    assert server.load(folders[1])
    server.find()
    histories = [
        [server.load(folders[1]), server.change("x"), server.change("y")] for _ in range(2)
    ]
    assert histories[0] == histories[1]
    assert server.lasting == histories[0][-1]


@pytest.mark.parametrize("digests", [[None], ["x", None], [None, "x"]])
def test_tensors_without_a_digest_never_last(server: Server, digests: list[str | None]) -> None:
    server.live.begin_hashing()
    server.find()
    contents = [server.change(digest) for digest in digests]
    assert server.lasting is None
    assert contents[-1] != [server.change(digest) for digest in digests][-1]


def test_an_update_before_the_base_is_known_never_lasts(server: Server) -> None:
    server.change("x")
    server.live.begin_hashing()
    # The folder is hashed for the next time, but these are other weights.
    server.find()
    assert server.lasting is None
    assert server.live.read.digest is not None


def test_weights_that_are_read_again_are_those_of_the_folder(
    server: Server, folders: list[Path]
) -> None:
    server.load(folders[1])
    server.find()
    content = server.load(folders[1])
    server.change("x")
    server.live.sleep(2)
    server.live.wake(["weights", "kv_cache"])
    assert server.live.version.content == content == server.find()
    server.live.sleep(2)
    write(folders[1], b"c", OLD + 1)
    server.live.wake(["weights"])
    assert server.live.version.content != content
    assert server.find() not in (None, content)


def test_a_label_changes_no_content(server: Server) -> None:
    server.live.begin_hashing()
    lasting = server.find()
    server.live.relabel("new")
    assert server.lasting == lasting


def test_an_engine_that_is_started_anew_keeps_what_it_read(
    server: Server, folders: list[Path], memory: DigestMemory
) -> None:
    server.load(folders[1])
    lasting = server.find()
    server.change("x")
    anew = Server(folders[0], memory)
    anew.load(folders[1])
    assert anew.lasting == lasting
    # All tensors since come as one update, whose digest is not known.
    anew.change(None)
    anew.live.restore(WeightsHistory(version=server.live.version, num_updates=2))
    assert anew.live.version == server.live.version
    assert anew.lasting is None


def test_a_refused_update_changes_nothing(server: Server, folders: list[Path]) -> None:
    server.live.begin_hashing()
    lasting = server.find()
    server.live.prepare(WeightsUpdate(folder=folders[1]))
    server.live.drop_prepared()
    assert (server.live.version, server.lasting) == (WeightsVersion(), lasting)
    assert server.live.read.folder == folders[0]
    assert SeenFolder().digest is None
