"""``mlx_parallm batch`` with the embedded model, its lines from a pipe."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx2

from mlx_parallm import child_process
from tests.server_process import ROOT, ServerProcess

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
