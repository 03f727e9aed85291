"""Small models that score, by one server, and how tests ask it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2

from tests.cross_encoder_folder import (
    write_broken,
    write_cross_encoder,
    write_reward_model,
    write_step_model,
)
from tests.embedder_folder import write_embedder, write_encoder_of
from tests.server_process import ServerProcess

DEMO = Path(__file__).parents[1] / "mlx_parallm" / "demo_models" / "chat"
QUERY = "w10 w11 w12"
DOCUMENTS = ["w20 w21", "w10 w11 w12 w30 w31 w32 w33 w34", "w44"]
LOGITS = "torch.nn.modules.linear.Identity"


def write_models(folder: Path) -> dict[str, Path]:
    """By name; ``three`` is a classifier with three labels, ``demo`` generates."""
    return {
        "cross": write_cross_encoder(folder / "cross"),
        "logits": write_cross_encoder(
            folder / "logits", sbert_ce_default_activation_function=LOGITS
        ),
        "embedder": write_embedder(folder / "embedder"),
        "three": write_encoder_of(folder / "three", "bert_sequence"),
        "broken": write_broken(folder / "broken"),
        "reward": write_reward_model(folder / "reward"),
        "steps": write_step_model(folder / "steps"),
        "demo": DEMO,
    }


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    answer = httpx2.post(f"{server.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(server: ServerProcess, path: str, body: dict[str, Any], status: int = 400) -> Any:
    """Return the error of a refused request; check that the server goes on."""
    answer = httpx2.post(f"{server.url}{path}", json=body)
    assert answer.status_code == status, answer.text
    assert len(answer.text) < 2000
    assert httpx2.get(f"{server.url}/health").status_code == 200
    return answer.json()["error"]


def scores(results: list[dict[str, Any]], field: str = "relevance_score") -> list[float]:
    """By document."""
    return [result[field] for result in sorted(results, key=lambda entry: entry["index"])]
