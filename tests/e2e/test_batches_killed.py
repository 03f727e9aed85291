"""A batch whose server is killed in the middle: every line is answered exactly once."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import httpx2
import openai
import pytest

from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

NUM_LINES = 500
MODEL = "mlx-parallm-demo"
POLL_S = 0.02


def serve(folder: Path) -> ServerProcess:
    server = ServerProcess(
        "--max-model-len", "256", "--max-num-seqs", "32", "--data-dir", str(folder),
        "--disable-access-log",
    )  # fmt: skip
    server.wait_until_ready()
    return server


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def line(number: int) -> str:
    # Every hundredth line is wrong, so the error file is tested too.
    tokens = -1 if number % 100 == 7 else 3
    body = {"model": MODEL, "prompt": f"{number} +", "max_tokens": tokens, "temperature": 0}
    return json.dumps(
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
    )


def wait_for(server: ServerProcess, batch_id: str, num_answered: int) -> openai.types.Batch:
    """Poll until so many lines are answered, or the batch has ended."""
    with client_of(server) as client:
        while True:
            batch = client.batches.retrieve(batch_id)
            counts = batch.request_counts
            assert counts is not None
            if batch.status == "completed" or counts.completed + counts.failed >= num_answered:
                return batch
            time.sleep(POLL_S)


def test_a_batch_survives_two_kills(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    server = serve(folder)
    with client_of(server) as client:
        content = "\n".join(line(number) for number in range(NUM_LINES)).encode()
        source = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch_id = client.batches.create(
            input_file_id=source.id, endpoint="/v1/completions", completion_window="24h"
        ).id
    answered = []
    for share in (NUM_LINES // 4, NUM_LINES // 2):
        # A fast machine may have answered more lines than that before the first kill.
        batch = wait_for(server, batch_id, max([share, *(number + 1 for number in answered)]))
        assert batch.status == "in_progress"
        assert batch.request_counts is not None
        answered.append(batch.request_counts.completed + batch.request_counts.failed)
        server.stop(signal.SIGKILL)
        server = serve(folder)
    batch = wait_for(server, batch_id, NUM_LINES + 1)
    assert NUM_LINES // 4 <= answered[0] < answered[1] < NUM_LINES
    # Lines that were answered before the kills were not answered again.
    assert server.metric("vllm:generation_tokens_total") <= 3 * (NUM_LINES - answered[1])
    check_answers(server, batch)
    server.stop()


def check_answers(server: ServerProcess, batch: openai.types.Batch) -> None:
    at_fault = [f"line-{number}" for number in range(7, NUM_LINES, 100)]
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {
        "total": NUM_LINES, "completed": NUM_LINES - len(at_fault), "failed": len(at_fault),
    }  # fmt: skip
    assert batch.output_file_id
    assert batch.error_file_id
    with client_of(server) as client:
        texts = [
            client.files.content(name).text for name in (batch.output_file_id, batch.error_file_id)
        ]
    good, bad = ([json.loads(line) for line in text.splitlines()] for text in texts)
    assert [answer["custom_id"] for answer in bad] == at_fault
    assert {answer["response"]["status_code"] for answer in bad} == {400}
    expected = [f"line-{number}" for number in range(NUM_LINES)]
    assert [answer["custom_id"] for answer in good] == [
        custom_id for custom_id in expected if custom_id not in at_fault
    ]
    assert len({answer["id"] for answer in good + bad}) == NUM_LINES
    for answer in good[:: NUM_LINES // 5]:
        number = int(answer["custom_id"].removeprefix("line-"))
        response = httpx2.post(
            f"{server.url}/v1/completions", json=json.loads(line(number))["body"]
        )
        assert (
            answer["response"]["body"]["choices"][0]["text"]
            == response.json()["choices"][0]["text"]
        )
