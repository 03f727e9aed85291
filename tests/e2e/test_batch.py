"""``mlx_parallm batch`` with the embedded model, its lines from a pipe."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mlx_parallm.peers import child_process
from tests.processes import are_gone, engines_of
from tests.server_process import POOL, ROOT, ServerProcess, user_environment

MODEL = "mlx-parallm-demo"

QUESTIONS = {str(i): f"What is {i} + {i + 5}?" for i in range(12)}


def body(question: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 12}


def batch_line(custom_id: str, **changes: Any) -> str:
    entry = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}
    return json.dumps(entry | {"body": body("Hello")} | changes)


def test_a_batch_is_answered_as_the_server_answers(
    live_server: ServerProcess, tmp_path: Path
) -> None:
    good = [batch_line(name, body=body(question)) for name, question in QUESTIONS.items()]
    bad = ["{", batch_line("0"), batch_line("lost", url="/v1/lost"), '{"body": {}}']
    target = tmp_path / "out.jsonl"
    limits = ["--max-num-seqs", "8", "--max-model-len", "256"]
    ended = child_process.run(
        ["mlx_parallm", "batch", "/dev/stdin", str(target), *limits],
        data="\n".join([*good[:6], *bad, *good[6:]]),
        text=True,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert ended.returncode == 1, ended.stderr
    assert "16 lines answered, 4 failed" in ended.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    errors = [answer["error"]["code"] for answer in answers if answer["error"]]
    assert sorted(errors) == ["duplicate_custom_id", "invalid_json_line", "invalid_request"]
    said = {a["custom_id"]: a["response"] for a in answers if a["response"]}
    assert said.pop("lost")["status_code"] == 404
    assert said.keys() == QUESTIONS.keys()
    for name, question in QUESTIONS.items():
        url = f"{live_server.url}/v1/chat/completions"
        served = httpx2.post(url, json=body(question)).json()
        assert said[name]["body"]["choices"] == served["choices"]
        usage = said[name]["body"]["usage"]
        assert usage["total_tokens"] == served["usage"]["total_tokens"]


class RunningBatch:
    """`mlx_parallm batch -dp 2`, which has answered a line and has others to answer."""

    def __init__(self, folder: Path, lines: Sequence[str]) -> None:
        source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        source.write_text("\n".join(lines))
        flags = ["-dp", "2", "--concurrency", "2", "--max-model-len", "256"]
        self.process = child_process.ChildProcess(
            ["mlx_parallm", "batch", str(source), str(self.target), *flags],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**user_environment(), **POOL},
        )
        # Engines are there before a line is answered, and until all lines are.
        while len(engines := engines_of(self.process.pid)) < 2:
            assert self.process.poll() is None
        self.engines = engines
        while not (self.target.exists() and self.target.read_text()):
            continue


@pytest.mark.engines
def test_two_engines_answer_a_batch(live_server: ServerProcess, tmp_path: Path) -> None:
    lines = [batch_line(name, body=body(question)) for name, question in QUESTIONS.items()]
    more = [batch_line(f"more {number}") for number in range(20)]
    running = RunningBatch(tmp_path, [*lines, *more])
    _, log = running.process.communicate()
    assert running.process.returncode == 0, log
    assert len(running.engines) == 2
    assert are_gone(running.engines)
    answers = [json.loads(line) for line in running.target.read_text().splitlines()]
    said = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
    assert len(said) == len(QUESTIONS) + len(more)
    for name, question in QUESTIONS.items():
        url = f"{live_server.url}/v1/chat/completions"
        assert said[name]["choices"] == httpx2.post(url, json=body(question)).json()["choices"]


@pytest.mark.engines
def test_an_interrupted_batch_leaves_no_engine(tmp_path: Path) -> None:
    running = RunningBatch(tmp_path, [batch_line(str(number)) for number in range(400)])
    running.process.send_signal(signal.SIGINT)
    running.process.communicate()
    assert running.process.returncode != 0
    assert len(running.engines) == 2
    assert are_gone(running.engines)


def test_options_of_http_are_unknown(tmp_path: Path) -> None:
    ended = child_process.run(
        ["mlx_parallm", "batch", "in.jsonl", "out.jsonl", "--api-server-count", "2"],
        text=True,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert ended.returncode == 2
    assert "unrecognized arguments: --api-server-count" in ended.stderr
