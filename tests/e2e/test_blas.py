"""Every process with a device computes with OpenBLAS on Linux, however it is started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm.demo_models.folders import DEMO_FOLDER
from tests.server_process import ServerProcess, user_environment

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="a Mac has Accelerate"),
    pytest.mark.slow,
]

LINE = re.compile(r"matrix products on the CPU take OpenBLAS .* \((.*)\)")
SERVERS = {
    "serve": ([], 1, 1),
    "engine process": (["--engine-process"], 1, 1),
    "engine of HTTP processes": (["--api-server-count", "2"], 1, 1),
    "two engines": (["--data-parallel-size", "2"], 1, 2),
    "two ranks": ([], 2, 2),
}
# BLAS: what a command in this process has computed with; it comes after all other output.
BLAS = "from mlx_parallm.process_setup.blas import blas_in_use\nprint(blas_in_use())"
COMMANDS = {
    "batch": "main(['batch', 'in.jsonl', 'out.jsonl'])",
    "bench engine": "main(['bench', 'engine', '--batch-size', '1', '--steps', '1'])",
    "doctor": "main(['doctor'])",
    "LLM": "from mlx_parallm import LLM, SamplingParams\n"
    "LLM().generate(['1 + 1'], SamplingParams(max_tokens=1))",
}


def environment(cache: Path) -> dict[str, str]:
    """Return the variables of a user with an empty cache who preloads nothing."""
    kept = {name: value for name, value in user_environment().items() if name != "LD_PRELOAD"}
    return kept | {"XDG_CACHE_HOME": str(cache)}


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_names_openblas_in_each_process(name: str, tmp_path: Path) -> None:
    flags, num_ranks, num_processes = SERVERS[name]
    server = ServerProcess(
        *("--model", str(DEMO_FOLDER), *flags),
        env={"LD_PRELOAD": "", "XDG_CACHE_HOME": str(tmp_path)},
        num_ranks=num_ranks,
        is_forked=False,
    )
    server.wait_until_ready()
    paths = LINE.findall(server.log)
    server.stop()
    (copy,) = (tmp_path / "mlx_parallm" / "openblas").glob("*.so")
    assert paths == [str(copy)] * num_processes


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_computes_with_openblas(name: str, tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    body = {"model": "mlx-parallm-demo", "prompt": "1 + 1", "max_tokens": 1}
    (tmp_path / "in.jsonl").write_text(json.dumps(line | {"body": body}))
    code = f"from mlx_parallm.cli.main import main\n{COMMANDS[name]}\n{BLAS}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path) | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    )
    (copy,) = (tmp_path / "mlx_parallm" / "openblas").glob("*.so")
    assert done.stdout.splitlines()[-1].startswith("OpenBLAS")
    assert done.stdout.splitlines()[-1].endswith(f"({copy})")
