"""Models of other lengths in one process."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.embedder_folder import write_embedder
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

DEMO = "mlx-parallm-demo"


@pytest.mark.parametrize(
    ("flags", "lengths"),
    [
        (["4096"], {DEMO: 4096, "small": 24}),
        (["4096", "small=16"], {DEMO: 4096, "small": 16}),
        ([f"{DEMO}=300"], {DEMO: 300, "small": 24}),
    ],
    ids=["shared", "both", "generator"],
)
def test_a_small_encoder_beside_a_generator(
    tmp_path: Path, flags: list[str], lengths: dict[str, int]
) -> None:
    folder = str(write_embedder(tmp_path / "small"))
    limits = [flag.replace("small=", f"{folder}=") for flag in flags]
    server = ServerProcess(
        *("--model", DEMO, folder, "--served-model-name", f"{folder}=small"),
        *(part for limit in limits for part in ("--max-model-len", limit)),
    )
    try:
        server.wait_until_ready()
        cards = httpx2.get(f"{server.url}/v1/models").json()["data"]
        assert {card["id"]: card["max_model_len"] for card in cards} | lengths == {
            card["id"]: card["max_model_len"] for card in cards
        }
        body = {"model": "small", "input": "hello"}
        assert httpx2.post(f"{server.url}/v1/embeddings", json=body).status_code == 200
    finally:
        server.stop()


def test_a_length_beyond_the_named_model_is_refused(tmp_path: Path) -> None:
    folder = str(write_embedder(tmp_path / "small"))
    server = ServerProcess("--model", DEMO, folder, "--max-model-len", f"{folder}=4096")
    status = server.process.wait()
    log = server.log
    server.stop()
    assert (status, f"--max-model-len is 4096; {folder} takes 24 tokens." in log) == (2, True), log
