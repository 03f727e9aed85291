"""Training sessions whose copies generate, and whose samples are judged, on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import httpx2
import pytest

from tests.mezo_sessions import asked, begun
from tests.server_process import ServerProcess

MODEL, REWARD = "mlx-parallm-demo", "demo:reward"
PROMPTS = [{"text": text, "metadata": {"number": n}} for n, text in enumerate(["a", "b", "1+1="])]
SAMPLING = {"max_tokens": 6, "temperature": 1.0}


class Judge(BaseHTTPRequestHandler):
    """Gives the share of even tokens, or what its server says."""

    seen: list[dict[str, Any]]
    answer: Any = None

    def do_POST(self) -> None:
        sample = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append(sample)
        ids = sample["token_ids"]
        reward = sum(token % 2 == 0 for token in ids) / len(ids)
        content = json.dumps({"reward": reward} if self.answer is None else self.answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Log nothing."""


@pytest.fixture(scope="module")
def judge() -> Iterator[tuple[type[Judge], str]]:
    kind = type("OwnJudge", (Judge,), {"seen": []})
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield kind, f"http://127.0.0.1:{server.server_port}/judge"
        server.shutdown()


@pytest.fixture(scope="module")
def server(judge: tuple[type[Judge], str]) -> Iterator[ServerProcess]:
    process = ServerProcess("--model", MODEL, REWARD, "demo:mlm", "--verifier-urls", judge[1])
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=None) as client:
        yield client


def session_of(**changes: Any) -> dict[str, Any]:
    objective = {"kind": "reward", "n": 2, "sampling": SAMPLING} | changes.pop("objective", {})
    return {
        "model": MODEL,
        "trainable": {"targets": ["q_proj"], "rank": 2, "init": "random"},
        "estimator": {"epsilon": 0.5},
        "objective": objective,
        "data": PROMPTS,
        "batch_size": 3,
    } | changes


def begin(client: httpx2.Client, **changes: Any) -> str:
    return begun(client, **session_of(**changes))


def test_losses_are_the_rewards_of_what_the_copies_generate(client: httpx2.Client) -> None:
    """Check a step against rollouts of the same adapters, which a caller is given."""
    reward = {"reward_model": {"model": REWARD}}
    path = begin(client, objective=reward, batches="by_length")
    caller = begin(client, objective={"kind": "caller", "n": None, "sampling": None}, **NO_DATA)
    (step,) = asked(client, f"{path}/step", return_losses=True)["data"]
    names = [copy["name"] for copy in asked(client, f"{caller}/ask")["data"]]
    seed = step["seed"] % 2**62
    means: list[list[float]] = []
    for name in names:
        rollout = asked(
            client,
            "/v1/rl/rollout",
            **{"model": name, "prompts": PROMPTS, "n": 2, "seed": seed, **SAMPLING, **reward},
        )
        means.append(
            [
                -sum(sample["reward"] for sample in group["samples"]) / 2
                for group in rollout["groups"]
            ]
        )
    assert sorted(step["losses"][0]) == pytest.approx(sorted(means[0]), abs=1e-5)
    assert sorted(step["losses"][1]) == pytest.approx(sorted(means[1]), abs=1e-5)
    assert step["loss_plus"] == pytest.approx(sum(means[0]) / 3, abs=1e-5)
    assert step["loss_minus"] == pytest.approx(sum(means[1]) / 3, abs=1e-5)
    assert step["loss_plus"] != step["loss_minus"]
    for each in (path, caller):
        client.delete(each)
    assert client.get("/v1/adapters").json()["data"] == []


def test_rewards_cannot_be_evaluated(client: httpx2.Client) -> None:
    path = begin(client, objective={"reward_model": {"model": REWARD}})
    answer = client.post(f"{path}/evaluate", json={"data": PROMPTS})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "data")
    client.delete(path)


def test_a_model_with_one_score_has_no_labels_to_learn(client: httpx2.Client) -> None:
    rows = [{"text": text, "label": 0} for text in "abc"]
    body = {"model": REWARD, "objective": {"kind": "labels"}, "data": rows, "batch_size": 2}
    answer = client.post("/v1/mezo/sessions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


NO_DATA: dict[str, Any] = {"data": None, "batch_size": None}


def test_a_verifier_is_told_of_each_sample(
    client: httpx2.Client, judge: tuple[type[Judge], str]
) -> None:
    kind, url = judge
    path = begin(client, objective={"verifier": {"url": url}})
    kind.seen.clear()
    asked(client, f"{path}/step", steps=2)
    assert len(kind.seen) == 2 * 2 * 3 * 2
    assert {sample["metadata"]["number"] for sample in kind.seen} == {0, 1, 2}
    assert all(sample["model"].startswith("mezo-") for sample in kind.seen)
    assert asked(client, f"{path}/run", steps=3)["status"] == "running"
    with client.stream("GET", f"{path}/events", params={"after": 2}) as stream:
        lines = [line for line in stream.iter_lines() if line.startswith("data: {")]
    assert [json.loads(line[6:])["step"] for line in lines] == [3, 4, 5]
    client.delete(path)


@pytest.mark.parametrize("answer", [{}, {"reward": "x"}, {"reward": None}])
def test_a_sample_without_a_reward_pauses_the_session(
    client: httpx2.Client, judge: tuple[type[Judge], str], answer: Any
) -> None:
    kind, url = judge
    path = begin(client, objective={"verifier": {"url": url}})
    before = asked(client, f"{path}/checkpoint")
    kind.answer = answer
    refused = client.post(f"{path}/step", json={})
    kind.answer = None
    assert refused.status_code == 409
    session = client.get(path).json()
    assert (session["status"], session["step"]) == ("paused", 0)
    assert "no reward" in session["reason"]
    assert asked(client, f"{path}/checkpoint") == before
    assert client.get("/v1/adapters").json()["data"] == []
    asked(client, f"{path}/resume")
    assert asked(client, f"{path}/step")["data"][0]["step"] == 1
    client.delete(path)


BOTH = {"verifier": {"url": "http://x"}, "reward_model": {"model": REWARD}}


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"objective": {}}, 400, "objective"),
        ({"objective": BOTH}, 400, "objective"),
        ({"objective": {"reward_model": {"model": "nothing"}}}, 404, "objective.reward_model"),
        ({"objective": {"reward_model": {"model": MODEL}}}, 400, "objective.reward_model"),
        ({"objective": {"verifier": {"url": "http://127.0.0.1/x"}}}, 400, "objective.verifier.url"),
        ({"objective": {"sampling": {"seed": 1}}}, 400, "objective"),
        ({"objective": {"sampling": {"max_token": 1}}}, 400, "objective"),
        ({"objective": {"sampling": {"temperature": "hot"}}}, 400, "objective"),
        ({"objective": {"template": "x"}}, 400, "objective.template"),
        ({"model": "demo:mlm"}, 400, "model"),
        ({"data": [{"text": "a", "label": "b"}] * 3}, 400, "data"),
        ({"data": [{"text": "a1 " * 60000}] * 3}, 400, "data"),
        ({"data": None}, 400, "data"),
        ({"estimator": {"directions": 3, "groups": True}}, 400, "estimator.groups"),
    ],
)
def test_bad_input_is_refused_by_its_field(
    client: httpx2.Client, changes: dict[str, Any], status: int, param: str
) -> None:
    objective = {"reward_model": {"model": REWARD}} | changes.get("objective", {})
    if changes.get("objective") == {}:
        objective = {}
    if "verifier" in objective and changes["objective"] is not BOTH:
        del objective["reward_model"]
    answer = client.post("/v1/mezo/sessions", json=session_of(**changes | {"objective": objective}))
    assert answer.status_code == status, answer.text
    assert (answer.json()["error"]["param"] or "").startswith(param), answer.text
