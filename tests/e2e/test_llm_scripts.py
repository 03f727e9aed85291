"""Scripts with an ``LLM`` that end by themselves, by Ctrl-C, or before the model is loaded."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from mlx_parallm.peers.child_process import ChildProcess
from tests.server_process import ROOT, user_environment

# SCRIPT: nothing is closed.
SCRIPT = """
from mlx_parallm import LLM, SamplingParams
from mlx_parallm.config import CacheConfig
print("begun", flush=True)
llm = LLM(cache=CacheConfig(kv_cache_bytes=1 << 27))
while True:
    llm.generate(["1, 2, 3,"] * 4, SamplingParams(max_tokens=8, temperature=0.0))
    print("answered", flush=True)
"""


def script(tmp_path: Path, text: str) -> ChildProcess:
    (tmp_path / "script.py").write_text(text)
    return ChildProcess(
        ["script"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**user_environment(), "PYTHONPATH": str(ROOT)},
    )


def test_a_script_ends_without_close(tmp_path: Path) -> None:
    process = script(tmp_path, SCRIPT.replace("while True", "for _ in range(1)"))
    written, log = process.communicate()
    assert process.returncode == 0, log
    assert written == "begun\nanswered\n"


# EMBEDS: it has used the threads of the event loop too.
EMBEDS = """
from mlx_parallm import LLM
texts = [f"Text {number}." for number in range(64)]
assert len(LLM("demo:embed").embed(texts)) == 64
llm = LLM("demo:embed")
llm.embed(texts)
print("embedded", flush=True)
"""


def test_a_script_that_embeds_ends_without_close(tmp_path: Path) -> None:
    process = script(tmp_path, EMBEDS)
    written, log = process.communicate()
    assert process.returncode == 0, log
    assert written == "embedded\n"
    assert "Traceback" not in log


def test_ctrl_c_ends_a_script_that_generates(tmp_path: Path) -> None:
    process = script(tmp_path, SCRIPT)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["begun\n", "answered\n"]
    process.send_signal(signal.SIGINT)
    _, log = process.communicate()
    assert "KeyboardInterrupt" in log
    # A process that is aborted has died of another signal.
    assert process.returncode in (1, -signal.SIGINT), log


def test_ctrl_c_ends_a_script_that_loads(tmp_path: Path) -> None:
    process = script(tmp_path, SCRIPT)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    _, log = process.communicate()
    assert "KeyboardInterrupt" in log
    assert process.returncode in (1, -signal.SIGINT), log
