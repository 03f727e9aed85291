"""Training sessions of servers that cannot have any."""

from __future__ import annotations

from pathlib import Path

import httpx2

from mlx_parallm.config import EngineConfig, RanksConfig
from mlx_parallm.server_config import ServerConfig
from tests.fake_engine import FakeEngine, serve_fake


def test_a_server_without_a_data_folder_names_the_flag() -> None:
    with serve_fake(FakeEngine()) as url:
        answer = httpx2.get(f"{url}/v1/mezo/sessions")
    assert answer.status_code == 409
    assert "--data-dir" in answer.json()["error"]["message"]


def test_sessions_are_refused_on_one_of_several_ranks(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.engine_config = EngineConfig(ranks=RanksConfig(size=2))
    with serve_fake(engine, ServerConfig(data_dir=str(tmp_path))) as url:
        answer = httpx2.get(f"{url}/v1/mezo/sessions")
    assert answer.status_code == 409
    assert "mlx.launch" in answer.json()["error"]["message"]
