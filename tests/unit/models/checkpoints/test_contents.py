"""Contents of checkpoints: of all their bytes, from names of a hub cache, a memory, or a thread."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, fields, replace
from pathlib import Path

import pytest

from mlx_parallm.models.checkpoints import contents
from mlx_parallm.models.checkpoints.contents import (
    MEMORY,
    DigestMemory,
    FileState,
    FolderContents,
    SeenFolder,
    user_memory,
)
from mlx_parallm.models.checkpoints.overrides import lasting_folder_with
from mlx_parallm.models.checkpoints.weight_files import INDEX
from mlx_parallm.worker.weights.revision import folder_revision

#: OLD: a time of files that do not change any more, in seconds.
OLD = 1_600_000_000
FILE = "model.safetensors"
SETTLED = FileState("/x", size=1, mtime_ns=0, ctime_ns=0, inode=1, device=1)


def write_model(folder: Path, weights: bytes = bytes(3_000_000)) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return put(folder / FILE, weights).parent


def put(path: Path, data: bytes, time_s: float = OLD) -> Path:
    """Write a file with a modification time."""
    path.write_bytes(data)
    os.utime(path, (time_s, time_s))
    return path


def put_later(path: Path, data: bytes, other: Path) -> None:
    """Change a file in place later than ``other`` changed, and restore its time."""
    put(path, data)
    while path.stat().st_ctime_ns <= other.lstat().st_ctime_ns:
        put(path, data)


def later() -> int:
    """Return a time at which files that are written now have settled."""
    return time.time_ns() + 10 * contents.SETTLED_NS


def hashed(folder: Path, memory: DigestMemory | None = None) -> str | None:
    """Return the content of a folder once the thread has ended."""
    finder = FolderContents(memory)
    seen = finder.see(folder)
    finder.hash(seen)
    finder.join()
    return seen.digest


@pytest.fixture
def memory(tmp_path: Path) -> DigestMemory:
    return DigestMemory(tmp_path / "cache", later)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that are hashed."""
    names: list[str] = []
    hash_file = contents._hash_file

    def counted(state: FileState, stopped: threading.Event) -> str | None:
        names.append(Path(state.path).name)
        return hash_file(state, stopped)

    monkeypatch.setattr(contents, "_hash_file", counted)
    return names


def test_a_megabyte_between_the_samples_of_a_revision_decides(tmp_path: Path) -> None:
    size = 30_000_000
    first = write_model(tmp_path / "a", bytes(size))
    changed = bytearray(size)
    changed[14_500_000:15_500_000] = b"\1" * 1_000_000
    other = write_model(tmp_path / "b", bytes(changed))
    assert folder_revision(first) == folder_revision(other)
    assert None is not hashed(first) != hashed(other) is not None


CHANGES: dict[str, Callable[[Path], object]] = {
    "one byte": lambda folder: put(folder / FILE, bytes(2_999_999) + b"\1", OLD + 1),
    "a byte more": lambda folder: put(folder / FILE, bytes(3_000_001)),
    "config": lambda folder: (folder / "config.json").write_text('{"rms_norm_eps": 1e-6}'),
    "quantisation": lambda folder: (folder / "hf_quant_config.json").write_text("{}"),
    "code": lambda folder: (folder / "model.py").write_text("class Model: ..."),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_in_place_changes_the_content(
    tmp_path: Path, memory: DigestMemory, change: Callable[[Path], object]
) -> None:
    folder = write_model(tmp_path / "model")
    before = hashed(folder, memory)
    change(folder)
    assert None is not hashed(folder, memory) != before is not None


def test_a_change_in_place_with_the_same_size_and_time_changes_the_content(
    tmp_path: Path, memory: DigestMemory, reads: list[str]
) -> None:
    """Programs such as ``rsync --inplace --times`` and ``cp -p`` make such changes."""
    folder, mark = write_model(tmp_path / "model"), put(tmp_path / "mark", b"")
    before = hashed(folder, memory)
    put_later(folder / FILE, bytes(2_999_999) + b"\1", mark)
    assert FolderContents(memory).see(folder).digest is None
    assert None is not hashed(folder, memory) != before is not None
    assert reads == [FILE, FILE]


@pytest.mark.parametrize("name", [each.name for each in fields(FileState)])
def test_a_file_in_another_state_has_no_remembered_digest(
    tmp_path: Path, memory: DigestMemory, name: str
) -> None:
    state = FileState.of(put(tmp_path / "file", b"x"))
    memory.put(state, "0" * 64)
    assert memory.find([state]) == {state: "0" * 64}
    other = f"{state.path}2" if name == "path" else getattr(state, name) + 1
    assert memory.find([replace(state, **{name: other})]) == {}


def test_the_memory_is_read_once_for_all_files_of_a_folder(
    tmp_path: Path, memory: DigestMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model")
    names = [f"model-{number}.safetensors" for number in range(5)]
    for name in names:
        put(folder / name, name.encode())
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: name for name in names}}))
    assert hashed(folder, memory) is not None
    parsed: list[bytes] = []
    loads = json.loads

    def counted(text: bytes) -> object:
        parsed.append(text)
        return loads(text)

    monkeypatch.setattr(contents.json, "loads", counted)
    finder = FolderContents(memory)
    seen = finder.see(folder)
    assert seen.digest is not None
    memories = (tmp_path / "cache" / MEMORY).read_bytes()
    assert parsed.count(memories) == 1
    # What is asked after a load needs no digests.
    assert finder.confirm(seen) is seen
    assert parsed.count(memories) == 1


def test_a_copy_and_a_new_tokenizer_have_the_same_content(tmp_path: Path) -> None:
    first, other = (write_model(tmp_path / name) for name in "ab")
    (other / "tokenizer.json").write_text("{}")
    put(other / FILE, bytes(3_000_000), OLD + 5)
    assert hashed(first) == hashed(other)


def test_what_is_hashed_once_is_known_at_once_later(
    tmp_path: Path, memory: DigestMemory, reads: list[str]
) -> None:
    folder = write_model(tmp_path / "model")
    assert FolderContents(memory).see(folder).digest is None
    digest = hashed(folder, memory)
    assert digest is not None
    assert FolderContents(memory).see(folder).digest == digest == hashed(folder, memory)
    assert reads == [FILE]
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert FolderContents(memory).see(link).digest == digest


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"[]",
        b'{"FILE": null}',
        b'{"FILE": [1, 2, 3, 4, 5, "x"]}',
        b'{"FILE": ["a", 2, 3, 4, 5, "DIGEST"]}',
        b'{"FILE": [3000000, 1600000000000000000, INODE, "DIGEST"]}',
        b'{"FILE": [NUMBERS, "ff"]}',
        b'{"FILE": [NUMBERS]}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_memory_means_hashing_again(
    tmp_path: Path, memory: DigestMemory, reads: list[str], content: bytes
) -> None:
    folder = write_model(tmp_path / "model")
    path = folder / FILE
    (tmp_path / "cache").mkdir()
    damaged = (
        content.replace(b"FILE", str(path).encode())
        .replace(b"INODE", str(path.stat().st_ino).encode())
        .replace(b"NUMBERS", json.dumps(astuple(FileState.of(path))[1:]).strip("[]").encode())
        .replace(b"DIGEST", b"0" * 64)
    )
    (tmp_path / "cache" / MEMORY).write_bytes(damaged)
    assert hashed(folder, memory) == hashed(folder)
    assert reads == [FILE, FILE]
    assert FolderContents(memory).see(folder).digest is not None


def test_a_memory_that_cannot_be_written_means_hashing_again(
    tmp_path: Path, reads: list[str]
) -> None:
    folder = write_model(tmp_path / "model")
    (tmp_path / "file").write_text("")
    for memory in (DigestMemory(tmp_path / "file" / "cache"), DigestMemory(None)):
        reads.clear()
        assert hashed(folder, memory) == hashed(folder, memory) is not None
        assert reads == [FILE, FILE]


def test_the_memory_keeps_the_newest(
    tmp_path: Path, memory: DigestMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MAX_REMEMBERED", 3)
    states = [FileState.of(put(tmp_path / str(number), b"x")) for number in range(5)]
    for state in (*states, states[2]):
        memory.put(state, "0" * 64)
    kept = json.loads((tmp_path / "cache" / MEMORY).read_bytes())
    assert list(kept) == [states[number].path for number in (3, 4, 2)]
    assert oct((tmp_path / "cache").stat().st_mode)[-3:] == "700"
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_file_that_may_change_within_its_time_is_not_remembered(
    tmp_path: Path, memory: DigestMemory
) -> None:
    folder = write_model(tmp_path / "model")
    young = DigestMemory(tmp_path / "cache")
    assert hashed(folder, young) is not None
    assert FolderContents(memory).see(folder).digest is None
    # Clocks of servers differ.
    put(folder / FILE, bytes(3_000_000), 2 * OLD)
    assert hashed(folder, memory) is not None
    assert FolderContents(memory).see(folder).digest is None


def hub_model(
    root: Path, weights: bytes = bytes(3_000_000), *, repository: str = "models--a--b"
) -> Path:
    """Write a model as a hub cache has it."""
    blobs, snapshot = root / repository / "blobs", root / repository / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob = put(blobs / hashlib.sha256(weights).hexdigest(), weights)
    (snapshot / FILE).symlink_to(os.path.relpath(blob, snapshot))
    put(blobs / ("0" * 40), b"{}")
    (snapshot / "config.json").symlink_to(f"../../blobs/{'0' * 40}")
    return snapshot


def test_names_of_a_hub_cache_are_used_as_they_are(tmp_path: Path, reads: list[str]) -> None:
    folder = hub_model(tmp_path)
    digest = FolderContents().see(folder).digest
    assert digest is not None
    assert not reads
    plain = write_model(tmp_path / "plain")
    assert digest == hashed(plain)
    # A link to it, as for a config with overrides.
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "config.json").write_text("{}")
    (linked / FILE).symlink_to((folder / FILE).resolve())
    assert FolderContents().see(linked).digest == digest


def test_a_blob_that_was_changed_in_place_is_hashed(tmp_path: Path, reads: list[str]) -> None:
    folder = hub_model(tmp_path)
    blob = (folder / FILE).resolve()
    before = FolderContents().see(folder).digest
    put_later(blob, bytes(2_999_999) + b"\1", folder / FILE)
    assert None is not hashed(folder) != before
    assert reads == [blob.name]


def with_overrides(snapshot: Path) -> Path:
    """Return a folder of links to a snapshot's files, as for a config with overrides."""
    return lasting_folder_with(snapshot, {"rms_norm_eps": 1e-6})


def next_snapshot(snapshot: Path) -> Path:
    """Return the folder of another revision, to whose blobs the cache links too."""
    other = snapshot.with_name("4567def")
    shutil.copytree(snapshot, other, symlinks=True)
    return other


@pytest.mark.parametrize("link", [with_overrides, next_snapshot])
def test_a_link_that_is_made_later_hides_no_change_of_a_blob(
    tmp_path: Path,
    reads: list[str],
    monkeypatch: pytest.MonkeyPatch,
    link: Callable[[Path], Path],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = hub_model(tmp_path)
    before = link(folder)
    digest = FolderContents().see(before).digest
    assert digest is not None
    shutil.rmtree(before)
    put_later((folder / FILE).resolve(), bytes(2_999_999) + b"\1", folder / FILE)
    after = link(folder)
    assert FolderContents().see(after).digest is None
    assert None is not hashed(after) != digest
    assert len(reads) == 1


def without_links(folder: Path) -> None:
    """Copy blobs into the snapshot, as a cache without symbolic links has them."""
    data = (folder / FILE).read_bytes()
    (folder / FILE).unlink()
    put(folder / FILE, data)


def with_git_name(folder: Path) -> None:
    """Name the blob by SHA-1, as of a file that is not in LFS."""
    blob = (folder / FILE).resolve()
    named = blob.rename(blob.with_name(hashlib.sha1(b"", usedforsecurity=False).hexdigest()))
    (folder / FILE).unlink()
    (folder / FILE).symlink_to(named)


def elsewhere(folder: Path) -> None:
    """Link to a file of such a name in a folder that is no hub cache."""
    data = (folder / FILE).read_bytes()
    (folder / FILE).unlink()
    other = folder.parent / "blobs"
    other.mkdir()
    (folder / FILE).symlink_to(put(other / ("1" * 64), data))


@pytest.mark.parametrize("change", [without_links, with_git_name, elsewhere])
def test_other_names_are_no_digests(
    tmp_path: Path, reads: list[str], change: Callable[[Path], None]
) -> None:
    folder = hub_model(tmp_path)
    expected = FolderContents().see(folder).digest
    change(folder)
    assert FolderContents().see(folder).digest is None
    assert hashed(folder) == expected
    assert len(reads) == 1


def test_a_folder_that_changed_after_it_was_seen_has_no_content(
    tmp_path: Path, memory: DigestMemory
) -> None:
    folder, finder = write_model(tmp_path / "model"), FolderContents(memory)
    seen = finder.see(folder)
    put(folder / FILE, bytes(2_999_999) + b"\1", OLD + 1)
    finder.hash(seen)
    finder.join()
    assert seen.digest is None
    assert memory.find(seen.files) == {}
    assert not seen.is_like(finder.see(folder))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_folder_that_changed_while_it_was_read_has_no_content(
    tmp_path: Path, memory: DigestMemory, reads: list[str], change: Callable[[Path], object]
) -> None:
    folder, finder = write_model(tmp_path / "model"), FolderContents(memory)
    assert hashed(folder, memory) is not None
    seen = finder.see(folder)
    assert finder.confirm(seen) is seen
    change(folder)
    read = finder.confirm(seen)
    assert (read.folder, read.code, read.digest) == (folder, seen.code, None)
    finder.hash(read)
    finder.join()
    assert read.digest is None
    assert reads == [FILE]
    # Nothing says that it is the same when it is read again.
    assert not finder.see(folder).is_like(read)


def test_a_folder_that_cannot_be_seen_has_no_content(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors.index.json").write_text("{")
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / FILE).symlink_to("nowhere")
    (tmp_path / "circle").mkdir()
    (tmp_path / "circle" / FILE).symlink_to(FILE)
    names = ("broken", "dangling", "circle", "none", "")
    for folder in (tmp_path / name for name in names):
        assert hashed(folder) is None
        # It may have other weights when it cannot be seen again.
        assert not FolderContents().see(folder).is_like(FolderContents().see(folder))
    assert SeenFolder().digest is None


def test_a_stopped_thread_ends_and_leaves_nothing(
    tmp_path: Path, memory: DigestMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "PIECE_BYTES", 1000)
    folder, finder = write_model(tmp_path / "model"), FolderContents(memory)
    begun, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        goes_on.wait()

    monkeypatch.setattr(contents, "_lower_priority", wait)
    seen = finder.see(folder)
    finder.hash(seen)
    begun.wait()
    finder.stop()
    goes_on.set()
    finder.join()
    assert seen.digest is None
    assert memory.find(seen.files) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a nice value on Linux only")
def test_only_the_thread_that_hashes_has_the_lowest_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nice: list[int] = []

    def hash_file(state: FileState, stopped: threading.Event) -> None:
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    monkeypatch.setattr(contents, "_hash_file", hash_file)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    hashed(write_model(tmp_path / "model"))
    assert nice == [contents.LOWEST]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_several_engines_read_the_files_once(
    tmp_path: Path, memory: DigestMemory, reads: list[str]
) -> None:
    folder = write_model(tmp_path / "model", bytes(20_000_000))
    finders = [FolderContents(memory) for _ in range(4)]
    seen = [finder.see(folder) for finder in finders]
    for finder, each in zip(finders, seen, strict=True):
        finder.hash(each)
    for finder in finders:
        finder.join()
    assert len({each.digest for each in seen}) == 1
    assert None not in {each.digest for each in seen}
    assert reads == [FILE]


def test_the_memory_is_in_the_users_cache_folder(tmp_path: Path) -> None:
    user_memory({"XDG_CACHE_HOME": str(tmp_path)}).put(SETTLED, "0" * 64)
    assert (tmp_path / "mlx_parallm" / MEMORY).is_file()


def test_a_folders_own_code_counts_by_name_and_text(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "folder.py").mkdir()
    digests = [FolderContents().see(folder).code]
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "1")):
        (folder / name).write_text(text)
        digests.append(FolderContents().see(folder).code)
    assert digests[0] == ""
    assert len(set(digests)) == 4
