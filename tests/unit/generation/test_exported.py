"""Questions of other servers about models of equal identity in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.generation.exported import find_weights, read_blocks, read_filter
from mlx_parallm.generation.kv_cache.peer.exports import Exports
from mlx_parallm.generation.kv_cache.peer.filters import UID_BYTES, ContentFilter
from mlx_parallm.types.errors import NotFoundError
from tests.kv_peers import OWNER
from tests.stored_prompts import OTHER, PROMPT, ask
from tests.unit.generation.kv_cache.peer.test_exports import Server


@dataclass
class Policies:
    model: str

    def lasting_contents(self) -> dict[str | None, str]:
        return {name: f"{self.model} {name}" for name in (None, "tuned")}


@dataclass
class Model:
    """A model that has computed a prompt."""

    name: str
    prompt: Sequence[int]
    is_paused: bool = False
    server: Server = field(default_factory=Server)

    def __post_init__(self) -> None:
        ask(self.server.harness, "first", self.prompt)
        self.server.harness.drain()
        self.policies = Policies(self.name)

    @property
    def exports(self) -> Exports:
        return self.server.exports

    @property
    def contents(self) -> list[bytes]:
        return list(self.exports.contents())


@dataclass
class Process:
    """A base, a tune of it, and a model without KV."""

    base: Model = field(default_factory=lambda: Model("base", PROMPT))
    tune: Model = field(default_factory=lambda: Model("tune", OTHER))

    @property
    def state(self) -> Any:
        return SimpleNamespace(engines={"encoder": object(), "base": self.base, "tune": self.tune})

    def read(self, contents: Sequence[bytes], **more: bool) -> list[bytes]:
        answer = read_blocks(self.state, OWNER, contents, **more)
        for _ in range(100):
            for model in (self.base, self.tune):
                model.server.turn()
        return [bytes(each) for each in answer.result(0)]


@pytest.fixture
def process() -> Process:
    return Process()


def test_a_filter_has_the_blocks_of_all(process: Process) -> None:
    answer = read_filter(process.state, OWNER).result()
    assert answer[:UID_BYTES] == process.base.exports.uid == process.tune.exports.uid
    known = ContentFilter(answer[UID_BYTES:])
    for model in (process.base, process.tune):
        assert model.contents
        assert all(content in known for content in model.contents)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("name", ["base", "tune"])
def test_blocks_come_from_the_model_that_has_them(process: Process, name: str, waits: bool) -> None:
    content = getattr(process, name).contents[0]
    assert len(process.read([content], waits=waits)) == 1
    # The other one is not left with a question.
    assert not any(model.exports._open for model in (process.base, process.tune))


def test_what_none_has_is_nothing(process: Process) -> None:
    assert process.read([b"x" * 32]) == []


def test_a_model_that_is_paused_gives_nothing(process: Process) -> None:
    (base, *_), (tune, *_) = process.base.contents, process.tune.contents
    process.base.is_paused = True
    assert process.read([base]) == []
    assert len(process.read([tune])) == 1
    process.tune.is_paused = True
    assert process.read([tune]) == []


def test_a_question_that_is_withdrawn_is_withdrawn_from_all(process: Process) -> None:
    answer = read_blocks(process.state, OWNER, [b"x" * 32], waits=True)
    answer.cancel()
    for model in (process.base, process.tune):
        model.server.turn()
        assert not model.exports._open


@pytest.mark.parametrize("model", ["base", "tune"])
@pytest.mark.parametrize("adapter", [None, "tuned"])
def test_weights_are_those_of_any(process: Process, model: str, adapter: str | None) -> None:
    assert find_weights(process.state, OWNER, f"{model} {adapter}") == (model, adapter)


def test_other_weights_and_identities_are_not_here(process: Process) -> None:
    with pytest.raises(NotFoundError, match="other weights"):
        find_weights(process.state, OWNER, "another None")
    with pytest.raises(NotFoundError, match="this identity"):
        read_filter(process.state, "cd" * 32)
