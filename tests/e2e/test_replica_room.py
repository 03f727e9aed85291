"""Servers of a fleet without room for one more adapter evict the same one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import adapter_files
from tests.replica_servers import SMALL, ReplicaServers, replicas

pytestmark = pytest.mark.slow
NAMES = ("b0", "b1", "b2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("room")
    for seed, name in enumerate((*NAMES, "named/n0", "named/n1"), 1):
        (root / name).parent.mkdir(exist_ok=True)
        adapter_files.save(root / name, seed)
    return root


@pytest.fixture(scope="module")
def fleet(root: Path) -> Iterator[ReplicaServers]:
    flags = ("--allowed-adapter-roots", str(root), "--adapter-dir", str(root / "named"))
    with replicas(2, *SMALL, "--max-cpu-loras", "2", *flags) as servers:
        yield servers


def load(fleet: ReplicaServers, root: Path, number: int, name: str) -> None:
    body = {"lora_name": name, "lora_path": str(root / name)}
    answer = fleet.ask(number, "POST", "/v1/load_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text


def loaded(fleet: ReplicaServers, number: int) -> set[str]:
    cards = fleet.ask(number, "GET", "/v1/adapters").json()["data"]
    return {card["name"] for card in cards} & set(NAMES)


def test_all_evict_what_the_server_that_was_asked_used_least_recently(
    fleet: ReplicaServers, root: Path
) -> None:
    load(fleet, root, 0, "b0")
    load(fleet, root, 0, "b1")
    # Each has used another one last.
    fleet.tokens(0, "b0")
    fleet.tokens(1, "b1")
    load(fleet, root, 0, "b2")
    assert loaded(fleet, 0) == loaded(fleet, 1) == {"b0", "b2"}
    journal = fleet.ask(1, "GET", "/v1/peers/journal").json()["journal"]
    assert {entry["head"]["name"] for entry in journal} == {"b0", "b2"}
    # Those that a request names have room only while the fleet's leave some, and make it again.
    name = {"model": "n0", "prompt": "x", "max_tokens": 1}
    assert fleet.ask(0, "POST", "/v1/completions", json=name).status_code == 400
    assert fleet.ask(0, "DELETE", "/v1/adapters/b0").status_code == 200
    for number, other in itertools.product((0, 1), ("n0", "n1")):
        fleet.tokens(number, other)
    load(fleet, root, 1, "b1")
    assert loaded(fleet, 0) == loaded(fleet, 1) == {"b1", "b2"}
    fleet.kill(1)
    fleet.start(1)
    assert loaded(fleet, 1) == {"b1", "b2"}
