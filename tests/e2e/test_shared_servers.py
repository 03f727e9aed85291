"""A test that fails leaves nothing on a server that it shares."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# TESTS: the first fails after it has left something of each kind; the second looks for it.
TESTS = """
import httpx2
import pytest
from tests.mezo_sessions import asked, begun
from tests.server_process import ServerProcess
from tests.server_state import state_of

SESSION = {
    "model": "demo:mlm",
    "objective": {"kind": "label_words", "template": "{text} [MASK].",
                  "label_words": {"a": "cat", "b": "dog"}},
    "data": [{"text": "one", "label": "a"}, {"text": "two", "label": "b"}],
    "batch_size": 2,
}

@pytest.fixture(scope="module")
def server():
    process = ServerProcess("demo:mlm", "demo:embed", "--admin-api-key", "admin", "--api-key", "k")
    process.wait_until_ready()
    yield process
    process.stop()

@pytest.fixture(scope="module")
def kept(server):
    with client_of(server) as client:
        asked(client, begun(client, **SESSION) + "/publish", name="kept")
    return state_of(server).names

@pytest.fixture
def own(server):
    with client_of(server) as client:
        path = begun(client, **SESSION)
        yield path
        assert client.delete(path).status_code == 200

def client_of(server):
    headers = {"authorization": "Bearer admin"}
    return httpx2.Client(base_url=server.url, headers=headers, timeout=None)

def test_fails(server, kept, own):
    assert len(kept["/v1/mezo/sessions"]) == len(kept["/v1/adapters"]) == 1
    with client_of(server) as client:
        path = begun(client, **SESSION)
        asked(client, f"{path}/publish", name="left")
        asked(client, f"{path}/run", steps=100_000)
        files = {"file": ("a.jsonl", b"{}")}
        assert client.post("/v1/files", data={"purpose": "batch"}, files=files).status_code == 200
        client.post("/sleep")
    raise AssertionError

def test_next(server, kept):
    assert state_of(server).names == kept
    with client_of(server) as client:
        assert client.get("/is_paused").json() == {"is_paused": False}
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
"""


@pytest.mark.slow
def test_the_next_test_finds_the_server_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(TESTS)
    plugins = ["-p", "tests.e2e.conftest", "-p", "tests.device_process_plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", *plugins, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
    )
    # The first one fails.
    assert done.stdout.startswith("F. "), done.stdout


@pytest.mark.parametrize("file", sorted(FOLDER.glob("test_*.py")), ids=lambda file: file.stem)
def test_a_shared_server_is_a_fixture_itself(file: Path) -> None:
    """Look for fixtures that yield a client or an address: they hide it from ``conftest.py``."""
    fixtures = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any("fixture(scope=" in ast.unparse(each) for each in node.decorator_list)
    ]
    for fixture in fixtures:
        text = ast.unparse(fixture)
        starts = "ServerProcess(" in text or "serving(" in text
        if starts and any(isinstance(node, ast.Yield) for node in ast.walk(fixture)):
            assert fixture.returns is not None, fixture.name
            assert ast.unparse(fixture.returns) == "Iterator[ServerProcess]", fixture.name
