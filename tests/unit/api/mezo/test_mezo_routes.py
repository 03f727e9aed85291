"""Training sessions of servers that cannot have any."""

from __future__ import annotations

import httpx2

from tests.fake_engine import FakeEngine, serve_fake


def test_a_server_without_a_data_folder_names_the_flag() -> None:
    with serve_fake(FakeEngine()) as url:
        answer = httpx2.get(f"{url}/v1/mezo/sessions")
    assert answer.status_code == 409
    assert "--data-dir" in answer.json()["error"]["message"]
