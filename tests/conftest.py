"""Fixtures shared by all tests."""

from __future__ import annotations

import copy
import gc
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fastapi.openapi.utils import get_openapi
from httpx2._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings

from mlx_parallm.kernels.store import FOLDER_VARIABLE, NOWHERE
from mlx_parallm.machine import count_cuda_devices
from tests.fake_mac.mac import FakeMac, pretend
from tests.forking_parent import shared_parent
from tests.mlx_header import precompile_header
from tests.scoring_server import write_models
from tests.server_process import ServerProcess, serving

# Their tests need clients that this environment does not have (make conformance, make trainers), or
# files that are fetched (make corpus).
collect_ignore = ["conformance", "trainers", "corpus"]

# How long an example takes says nothing on a busy machine. The examples are the same each time;
# pytest --hypothesis-seed=N tries others.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

# MANY_DESCRIPTORS: that a file of tests may leave open. select() takes none above 1,023.
MANY_DESCRIPTORS = 300

# SLOW_FIRST: expressions of ``-m`` that say of every test whether it is to be slow.
SLOW_FIRST = re.compile(r"(not )?slow( and not engines)?$|not engines and not slow$")
# ALL_SLOW: what marks all tests of a file.
ALL_SLOW = re.compile(
    r"^pytestmark = (pytest\.mark\.slow|\[pytest\.mark\.slow\b.*\])$", re.MULTILINE
)


def pytest_configure(config: pytest.Config) -> None:
    """Set up what all HTTP clients and all servers of tests share."""
    # Once, before there are workers of xdist.
    if sys.platform == "linux" and not hasattr(config, "workerinput"):
        precompile_header()
    # The collection makes millions of objects and little garbage: looking for it takes a quarter.
    gc.disable()
    # The limit of pytest ends a test that hangs; no client gives up earlier.
    for step in ("connect", "read", "write", "pool"):
        setattr(DEFAULT_TIMEOUT_CONFIG, step, None)
    # None reads the system's certificates: all talk plain HTTP, and it takes 30 ms.
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
    # Loads check what they choose, and leave nothing in the user's folder. A GPU's kernels are kept
    # there: to compile them takes minutes.
    if not count_cuda_devices():
        os.environ.setdefault(FOLDER_VARIABLE, NOWHERE)
    # Processes inherit what nohup, or a shell that runs tests in the background, ignores.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what ``-m`` selects nothing of: importing all files takes half a minute.

    ``make test-slow`` needs the files that name its marker, or beside which ``conftest.py`` does;
    ``make test`` does not need those whose tests all have it.
    """
    wanted = config.option.markexpr
    if not SLOW_FIRST.match(wanted) or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if wanted.startswith("slow"):
        beside = collection_path.with_name("conftest.py")
        text += beside.read_text(encoding="utf-8") if beside.exists() else ""
        return True if "slow" not in text else None
    return True if ALL_SLOW.search(text) else None


def pytest_unconfigure() -> None:
    """End what forks servers."""
    if shared_parent.cache_info().currsize and (parent := shared_parent()) is not None:
        parent.close()


def pytest_collection_finish() -> None:
    """Keep what the collection left out of every search for garbage, for good."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # Each search would take a second if a test undid it.
    gc.unfreeze = lambda: None


@pytest.fixture(scope="module", autouse=True)
def few_descriptors() -> Iterator[None]:
    """Let no file of tests leave many descriptors open for those that follow."""
    before = len(os.listdir("/dev/fd"))
    yield
    assert len(os.listdir("/dev/fd")) < before + MANY_DESCRIPTORS


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let no test's weights depend on the time or on the tests before it.

    It runs before the fixtures of any scope. MLX keeps a state per thread: what a test draws on
    a thread of its own it must seed there.
    """
    mx.random.seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session", autouse=True)
def _one_document_for_the_same_routes() -> Iterator[None]:
    """Let FastAPI describe routes once: it takes a second of CPU time, for each application."""
    described: dict[Any, tuple[Any, dict[str, Any]]] = {}

    def describe(*, routes: Sequence[Any], **options: Any) -> dict[str, Any]:
        key = (*map(id, routes), repr(sorted(options.items())))
        if key not in described:
            # The routes are kept, so that no others have their ids.
            described[key] = routes, get_openapi(routes=routes, **options)
        return copy.deepcopy(described[key][1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastapi.applications.get_openapi", describe)
        yield


@pytest.fixture(scope="module")
def short_searches_for_garbage() -> None:
    """Keep what earlier tests left out of the searches of a module that makes many."""
    gc.freeze()


@pytest.fixture(scope="session")
def live_server() -> Iterator[ServerProcess]:
    """`mlx_parallm serve` with the embedded model, in a process of its own."""
    server = ServerProcess(
        "--max-num-seqs", "32", "--max-model-len", "2048", "--kv-cache-memory-bytes", "1GiB"
    )
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def scoring_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yield a server of small models that rank, score and reward; see ``write_models``."""
    with serving(write_models(tmp_path_factory.mktemp("models"))) as server:
        yield server


@pytest.fixture
def fake_mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeMac]:
    """Return a function that lets this process see a ``FakeMac`` of these attributes.

    It sees the one of the last call until the test ends.
    """

    def become(**attributes: Any) -> FakeMac:
        mac = FakeMac(**attributes)
        pretend(mac, monkeypatch, tmp_path)
        return mac

    return become
