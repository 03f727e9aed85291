"""States on a disk that are damaged, exchanged or gone: misses, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.generation.kv_cache import fetches
from mlx_parallm.generation.kv_cache.disk.format import Header, unpack_header
from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.worker.generation.model_runner import ModelRunner
from tests.integration.test_parity_generate import BLOCK_SIZE, loaded_model, random_prompt
from tests.integration.test_stored_prefixes import (
    OWNER,
    PROMPT,
    StoredSession,
    ids_of,
    runners,
)

pytestmark = pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
#: SHORT is how PROMPT begins, so its state is an older one of the same chain.
SHORT, OTHER = PROMPT[:25], random_prompt(41, seed=9)
#: PLACES: where the states of SHORT and PROMPT are.
PLACES = (24, 40)


@pytest.fixture(autouse=True)
def _no_read_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "LONGEST_READ_S", 1e6)
    monkeypatch.setattr(fetches.UnitPace, "predict", lambda *_: None)


@dataclass
class StateFile:
    """A file of one state."""

    path: Path
    header: Header

    @property
    def num_bytes(self) -> int:
        return self.header.num_bytes

    def write(self, head: bytes, body: bytes) -> None:
        self.path.write_bytes(head + body)

    def parts(self) -> tuple[bytes, bytes]:
        raw = self.path.read_bytes()
        return raw[: self.num_bytes], raw[self.num_bytes :]


class Folder:
    """A folder for KV, and processes that use it one after the other."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.state_bytes = runner(name).info.state_bytes

    def ask(self, *prompts: tuple[int, ...], damage: Callable[[], object] | None = None) -> Any:
        """Return what a new process gives for prompts; something may happen after its start."""
        with closing(DiskStore(self.path, OWNER, 1 << 28)) as store:
            session = StoredSession(lambda: runner(self.name), [store])
            if damage is not None:
                damage()
            answers = [session.ask(str(number), each) for number, each in enumerate(prompts)]
            cached = [session.cached[str(number)] for number in range(len(prompts))]
        return answers, cached

    def files(self) -> list[tuple[Path, Header]]:
        files = list[tuple[Path, Header]]()
        for path in sorted(self.path.glob("*/*.kv1")):
            raw = path.read_bytes()
            size = int.from_bytes(raw[8:12], "little")
            files.append((path, unpack_header(raw[:size], OWNER, len(raw))))
        return files

    def states(self) -> list[StateFile]:
        """Return the files of states; which is which, their parents say."""
        files = [StateFile(*each) for each in self.files()]
        return [
            file
            for file in files
            if [span.length for span in file.header.spans()] == [self.state_bytes]
        ]

    def remove_blocks(self) -> None:
        states = {file.path for file in self.states()}
        for path, _ in self.files():
            if path not in states:
                path.unlink()


@cache
def runner(name: str) -> ModelRunner:
    return runners(loaded_model(name))()


@cache
def cold(name: str, prompt: tuple[int, ...]) -> Any:
    return StoredSession(runners(loaded_model(name)), []).ask("cold", prompt)


def is_like(answer: Any, wanted: Any) -> bool:
    """True if tokens are equal, and their log-probabilities but for rounding."""
    pairs = [
        (ours.logprob.logprob, others.logprob.logprob)
        for index in wanted
        for ours, others in zip(answer[index], wanted[index], strict=True)
    ]
    return ids_of(answer) == ids_of(wanted) and np.allclose(*zip(*pairs, strict=True), atol=1e-5)


@pytest.fixture
def folder(tmp_path: Path, name: str) -> Folder:
    """Return a folder in which a process has left three prompts with their states."""
    folder = Folder(tmp_path, name)
    answers, cached = folder.ask(SHORT, PROMPT, OTHER)
    assert cached == [0, PLACES[0], 0]
    for answer, prompt in zip(answers, (SHORT, PROMPT, OTHER), strict=True):
        assert is_like(answer, cold(name, prompt))
    return folder


def check(folder: Folder, damage: Callable[[], object], *, most: int) -> None:
    """Damage a folder before a process starts, or while it runs; check what prompts give then."""
    answers, cached = folder.ask(PROMPT, OTHER, SHORT, damage=damage)
    for answer, prompt in zip(answers, (PROMPT, OTHER, SHORT), strict=True):
        assert is_like(answer, cold(folder.name, prompt))
    assert cached[0] <= most
    # What was missing or damaged was computed, and is there again.
    again, cached = folder.ask(PROMPT, OTHER)
    assert cached == [PLACES[1]] * 2
    assert all(
        is_like(a, cold(folder.name, p)) for a, p in zip(again, (PROMPT, OTHER), strict=True)
    )


def flip(file: StateFile, place: int) -> None:
    raw = bytearray(file.path.read_bytes())
    raw[place] ^= 4
    file.path.write_bytes(raw)


def missing(folder: Folder) -> None:
    for file in folder.states():
        file.path.unlink()


def shorter(folder: Folder) -> None:
    for file in folder.states():
        head, body = file.parts()
        file.write(head, body[:-1])


def longer(folder: Folder) -> None:
    for file in folder.states():
        head, body = file.parts()
        file.write(head, body + b"\0")


def empty(folder: Folder) -> None:
    for file in folder.states():
        file.write(b"", b"")


def flipped_in_the_state(folder: Folder) -> None:
    for number, file in enumerate(folder.states()):
        flip(file, file.num_bytes + 17 * number)


def flipped_in_the_header(folder: Folder) -> None:
    for number, file in enumerate(folder.states()):
        flip(file, 40 + 17 * number)


def exchanged(folder: Folder) -> None:
    """Give each file the state of another one: of other prompts, and of an older turn."""
    files = folder.states()
    parts = [file.parts() for file in files]
    for file, (head, _), (_, body) in zip(files, parts, parts[1:] + parts[:1], strict=True):
        file.write(head, body)


def zeroed(folder: Folder) -> None:
    for file in folder.states():
        head, body = file.parts()
        file.write(head, bytes(len(body)))


DAMAGES = (missing, shorter, flipped_in_the_state, exchanged)
slow = pytest.mark.slow
MORE_DAMAGES = [pytest.param(each, marks=slow) for each in (empty, zeroed)]
#: IN_HEADERS: a process that runs has read the headers, and the states are whole.
IN_HEADERS = [pytest.param(each, marks=slow) for each in (longer, flipped_in_the_header)]


@pytest.mark.parametrize("damage", [*DAMAGES, *MORE_DAMAGES, *IN_HEADERS])
def test_damaged_states_are_misses_after_a_restart(
    damage: Callable[[Folder], None], folder: Folder
) -> None:
    damage(folder)
    check(folder, lambda: None, most=0)


@pytest.mark.parametrize(
    "damage", [exchanged, *(pytest.param(each, marks=slow) for each in DAMAGES[:-1]), *MORE_DAMAGES]
)
def test_damaged_states_are_misses_while_a_process_runs(
    damage: Callable[[Folder], None], folder: Folder
) -> None:
    check(folder, lambda: damage(folder), most=0)


def test_files_under_each_others_names_are_what_they_say(folder: Folder) -> None:
    files = folder.states()
    raws = [file.path.read_bytes() for file in files]
    for file, raw in zip(files, raws[1:] + raws[:1], strict=True):
        file.path.write_bytes(raw)
    check(folder, lambda: None, most=PLACES[1])


def test_states_without_their_blocks_are_of_no_use(folder: Folder) -> None:
    folder.remove_blocks()
    has_kv = folder.name != "mamba2"
    check(folder, lambda: None, most=0 if has_kv else PLACES[1])


def test_another_owner_reads_nothing(folder: Folder) -> None:
    with closing(DiskStore(folder.path, "cd" * 32, 1 << 28)) as store:
        session = StoredSession(lambda: runner(folder.name), [store])
        assert is_like(session.ask("other", PROMPT), cold(folder.name, PROMPT))
        assert session.cached["other"] == 0


def test_every_kind_of_state_has_files(folder: Folder) -> None:
    states = folder.states()
    # Those of the three prompts, which an answer may follow.
    assert len(states) == 3
    parents: Iterator[bytes] = (file.header.parent for file in states)
    assert all(bool(parent) is (folder.name != "mamba2") for parent in parents)
    assert folder.state_bytes % BLOCK_SIZE == 0
