"""Coding agents, unmodified, started by ``mlx_parallm launch``; ``make agents`` installs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_parallm.cli.launch.tools import TOOLS
from mlx_parallm.peers import child_process
from tests.builders.fixed_answer_model import ANSWER, write_fixed_answer_model
from tests.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "node_modules" / ".bin"
MODEL = "org/fixed"
KEY = "agents-key"
#: ``PROMPTED``: arguments that let an agent answer one prompt, and the route that it asks.
PROMPTED = {
    "claude": (["-p"], "/v1/messages"),
    "codex": (["exec", "--skip-git-repo-check"], "/v1/responses"),
    "opencode": (["run"], "/v1/chat/completions"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_fixed_answer_model(tmp_path_factory.mktemp("model"))
    process = ServerProcess(
        *("--model", str(folder), "--served-model-name", f"{folder}={MODEL}"),
        *("--api-key", KEY, "--tool-call-parser", "hermes"),
    )
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


@pytest.mark.parametrize("name", PROMPTED)
def test_an_agent_shows_the_answer(server: ServerProcess, tmp_path: Path, name: str) -> None:
    if not (PROGRAMS / TOOLS[name].program).exists():
        pytest.skip("`make agents` installs it")
    arguments, route = PROMPTED[name]
    done = child_process.run(
        ["mlx_parallm", "launch", name, "--url", server.url, "--", *arguments, "Say something"],
        # Nothing of the user's own settings of the agent counts.
        env={
            "PATH": os.pathsep.join((str(PROGRAMS), os.environ["PATH"])),
            "HOME": str(tmp_path),
            "PYTHONPATH": str(ROOT),
            "MLX_PARALLM_API_KEY": KEY,
            "TERM": "dumb",
        },
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ANSWER in done.stdout
    assert f"path={route} status=200" in server.log
