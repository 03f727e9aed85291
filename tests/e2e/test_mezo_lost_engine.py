"""A rewarded training session whose engine is killed in the middle of a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from http.server import HTTPServer
from threading import Event, Thread

import httpx2
import pytest

from tests.e2e.test_mezo_reward import Judge, begin
from tests.mezo_sessions import asked, events
from tests.processes import engines_of
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow


class HeldJudge(Judge):
    """Judges once it may, and says when it is asked."""

    is_asked, may_judge = Event(), Event()

    def do_POST(self) -> None:
        self.is_asked.set()
        self.may_judge.wait()
        super().do_POST()


@pytest.fixture
def url() -> Iterator[str]:
    HeldJudge.seen = []
    with HTTPServer(("127.0.0.1", 0), HeldJudge) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/judge"
        server.shutdown()


@pytest.fixture
def server(url: str) -> Iterator[ServerProcess]:
    flags = ("--data-parallel-size", "2", "--verifier-urls", url)
    process = ServerProcess("--model", "mlx-parallm-demo", *flags)
    process.wait_until_ready()
    yield process
    process.stop()


def test_runs_go_on_after_an_engine_was_killed_in_a_step(server: ServerProcess, url: str) -> None:
    """Kill each of both engines: one has the session, and each has samples."""
    with httpx2.Client(base_url=server.url, timeout=None) as client:
        path = begin(client, objective={"verifier": {"url": url}})
        for number, killed in enumerate(engines_of(server.process.pid)):
            HeldJudge.is_asked.clear()
            HeldJudge.may_judge.clear()
            asked(client, f"{path}/run", steps=2)
            HeldJudge.is_asked.wait()
            os.kill(killed, signal.SIGKILL)
            HeldJudge.may_judge.set()
            steps = [step["step"] for step in events(client, path, after=2 * number)]
            assert steps == [2 * number + 1, 2 * number + 2], client.get(path).text
            while client.get("/ready").json()["ready"] != 2:
                pass
        assert client.get(path).json()["status"] == "ready"
        assert client.get("/v1/adapters").json()["data"] == []
        client.delete(path)
