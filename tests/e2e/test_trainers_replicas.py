"""Trainers that send their updates to one of two servers change both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.replica_servers import ReplicaServers, replicas
from tests.server_process import ROOT
from tests.trainers.model_folder import write_model_folder
from tests.trainers.run_all import FLAGS, MODEL
from tests.trainers.suites import ART, HERE, STUBS, TRAINERS

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Sequence:
    """The update sequences of a trainer.

    Attributes:
        file: of their tests.
        words: choose the tests that change something.
        changes: how many changes of the fleet these are at least.
        python: has the trainer; ``make trainers`` installs it.
        path: a folder for PYTHONPATH.
    """

    file: str
    words: str
    changes: int
    python: Path = Path(sys.executable)
    path: Path = ROOT


SEQUENCES = {
    "replays": Sequence("test_replays.py", "TestPrimeRl or TestSlime or TestSkyRl", 20),
    "trl": Sequence("test_trl_async_grpo.py", "versions or training", 20, TRAINERS, STUBS),
    "art": Sequence("test_art.py", "mode or shared_gpu", 10, ART),
}


@dataclass(frozen=True)
class Trained:
    """Two servers, and the folders of ``tests.trainers.conftest``."""

    servers: ReplicaServers
    folder: Path
    adapters: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    root = tmp_path_factory.mktemp("trainers")
    adapters, folder = root / "adapters", root / "model"
    adapters.mkdir()
    write_model_folder(folder)
    roots = ("--adapter-dir", str(adapters), "--allowed-adapter-roots", str(root))
    with replicas(2, *FLAGS, *roots, key=None) as servers:
        yield Trained(servers, folder, adapters)


@pytest.mark.parametrize("name", SEQUENCES)
def test_updates_of_a_trainer_change_both(name: str, trained: Trained) -> None:
    sequence = SEQUENCES[name]
    if not sequence.python.exists():
        pytest.skip("make trainers installs it")
    before = changes_of(trained.servers)
    run(sequence, trained)
    trained.servers.check_alike()
    assert changes_of(trained.servers) >= before + sequence.changes


def changes_of(servers: ReplicaServers) -> int:
    """Return the number of the latest change, which both servers have."""
    rows = servers.ask(0, "GET", "/v1/peers").json()["data"]
    (number,) = {row["number"] for row in rows}
    return number


def run(sequence: Sequence, trained: Trained) -> None:
    """Run the tests of a trainer against the second server."""
    first, second = trained.servers.urls
    facts = {
        "URL": second,
        "PEERS": first,
        "MODEL": MODEL,
        "FOLDER": trained.folder,
        "ADAPTERS": trained.adapters,
        "SERVER_PYTHON": sys.executable,
    }
    variables = {f"TRAINERS_{name}": str(value) for name, value in facts.items()}
    settings = ["-q", "-c", str(HERE / "pytest.ini"), "--rootdir", str(ROOT)]
    done = subprocess.run(
        [sequence.python, "-m", "pytest", *settings, HERE / sequence.file, "-k", sequence.words],
        env={**os.environ, **variables, "PYTHONPATH": str(sequence.path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
