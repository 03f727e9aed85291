"""Training sessions whose losses the caller measures, with adapters that a real server serves."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.mezo_sessions import asked, begun
from tests.server_process import ServerProcess

MODEL, GENERATOR = "demo:mlm", "mlx-parallm-demo"
WORDS = {"good": "cat", "bad": "dog"}
TEXTS = {"a joyful film It was [MASK].": "good", "a dull film It was [MASK].": "bad"}
SESSION: dict[str, Any] = {
    "model": MODEL,
    "trainable": {"layers": "top:1", "targets": ["value", "attention.output.dense"], "rank": 4},
    "estimator": {"learning_rate": 0.06, "epsilon": 0.03},
    "objective": {"kind": "caller"},
}


TWO = pytest.param(("--data-parallel-size", "2"), id="two", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[pytest.param((), id="one"), TWO])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    process = ServerProcess("--model", MODEL, GENERATOR, "--max-cpu-loras", "5", *request.param)
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=None) as client:
        yield client


@pytest.fixture
def session(client: httpx2.Client) -> Iterator[str]:
    path = begin(client)
    yield path
    client.delete(path)


def begin(client: httpx2.Client, **changes: Any) -> str:
    """Begin a session; return its path."""
    return begun(client, **(SESSION | changes))


def refused(client: httpx2.Client, path: str, **body: Any) -> tuple[int, str]:
    """Return status and parameter of a refusal."""
    answer = client.post(path, json=body)
    return answer.status_code, str(answer.json()["error"]["param"])


def names_of(client: httpx2.Client, session: str) -> list[str]:
    return [copy["name"] for copy in asked(client, f"{session}/ask")["data"]]


def wrongness(client: httpx2.Client, model: str) -> float:
    """Return how far a model is from the right words: the loss of an environment."""
    answer = asked(client, "/v1/mlm", model=model, texts=list(TEXTS), label_words=WORDS)
    loss = 0.0
    for text, label in zip(answer["data"], TEXTS.values(), strict=True):
        (mask,) = text["predictions"]
        (word,) = [word for word in mask["words"] if word["label"] == label]
        loss -= word["logprob"]
    return loss


def adapters(client: httpx2.Client) -> list[str]:
    return [card["name"] for card in client.get("/v1/adapters").json()["data"]]


def test_an_environment_of_the_caller_is_learnt(client: httpx2.Client, session: str) -> None:
    before = wrongness(client, MODEL)
    for number in range(1, 41):
        names = names_of(client, session)
        losses = {name: wrongness(client, name) for name in names}
        (step,) = asked(client, f"{session}/tell", losses=losses)["data"]
        assert step["step"] == number
        assert [step["loss_plus"], step["loss_minus"]] == list(losses.values())
    asked(client, f"{session}/publish", name="learnt")
    assert wrongness(client, "learnt") < before - 0.5
    client.delete("/v1/adapters/learnt")


def test_copies_are_served_until_losses_are_told(client: httpx2.Client, session: str) -> None:
    names = names_of(client, session)
    assert [name[:-1] for name in names] == [names[0][:-1]] * 2
    assert names == names_of(client, session) == client.get(session).json()["pending"]
    assert sorted(adapters(client)) == sorted(names)
    # No result of a copy is kept.
    for model, is_kept in ((MODEL, True), (names[0], False)):
        texts = {"model": model, "texts": list(TEXTS)}
        assert asked(client, "/v1/mlm", **texts)["data"]
        again = asked(client, "/v1/mlm", **texts)["data"]
        assert [text["cache_hit"] for text in again] == [is_kept] * len(TEXTS)
    asked(client, f"{session}/tell", losses=[0.5, 0.25])
    assert adapters(client) == client.get(session).json()["pending"] == []
    assert client.post("/v1/mlm", json={"model": names[0], "texts": list(TEXTS)}).status_code == 404
    assert names_of(client, session) != names
    client.delete(session)
    assert adapters(client) == []


def test_directions_of_one_side_have_one_copy_in_common(client: httpx2.Client) -> None:
    session = begin(client, estimator={"kind": "one_sided", "directions": 3})
    copies = asked(client, f"{session}/ask")["data"]
    places = [(copy["direction"], copy["sign"]) for copy in copies]
    assert places == [(0, 1), (1, 1), (2, 1), (None, 1)]
    assert wrongness(client, copies[3]["name"]) == pytest.approx(wrongness(client, MODEL))
    assert wrongness(client, copies[0]["name"]) != pytest.approx(wrongness(client, MODEL))
    client.delete(session)


def test_copies_of_a_generator_sample_and_leave_nothing(client: httpx2.Client) -> None:
    trainable = {"layers": "all", "targets": ["q_proj", "v_proj"], "rank": 4}
    estimator = {"epsilon": 0.1, "learning_rate": 0.1}
    session = begin(client, model=GENERATOR, trainable=trainable, estimator=estimator)
    body = {"prompts": ["A long prompt, which fills more than one block. " * 8], "n": 1, "seed": 7}

    def rollout(model: str) -> dict[str, Any]:
        answer = asked(client, "/v1/rl/rollout", model=model, max_tokens=8, **body)
        return answer["groups"][0]

    def loss(group: dict[str, Any]) -> float:
        return -sum(group["samples"][0]["logprobs"])

    rollout(GENERATOR)
    assert rollout(GENERATOR)["cached_tokens"] > 0
    for _ in range(2):
        plus, minus = names_of(client, session)
        groups = [rollout(name) for name in (plus, minus, plus, minus)]
        assert [group["cached_tokens"] for group in groups] == [0] * 4
        assert groups[0]["samples"] == groups[2]["samples"]
        assert loss(groups[0]) != pytest.approx(loss(groups[1]), abs=1e-6)
        asked(client, f"{session}/tell", losses=[loss(group) for group in groups[:2]])
    assert adapters(client) == []
    # The blocks of the base are found as before.
    assert rollout(GENERATOR)["cached_tokens"] > 0
    client.delete(session)


def test_copies_compute_what_published_adapters_do(client: httpx2.Client) -> None:
    """Check both copies against adapters of sessions that made a step as long as epsilon."""
    trainable = {"layers": "top:2", "targets": ["q_proj", "v_proj"], "rank": 4}
    estimator = {"epsilon": 0.1, "learning_rate": 0.1, "normalise": False}
    sampling: dict[str, Any] = {"prompts": ["1, 2, 3,"], "max_tokens": 8, "seed": 5}

    def sampled(model: str) -> dict[str, Any]:
        answer = asked(client, "/v1/rl/rollout", model=model, **sampling)
        return answer["groups"][0]["samples"][0]

    logprobs: list[list[float]] = []
    # The slope is -1 or 1, so that the step leads to where the copy of this sign is.
    for place, losses in enumerate([[0.0, 0.2], [0.2, 0.0]]):
        session = begin(client, model=GENERATOR, trainable=trainable, estimator=estimator)
        copy = sampled(names_of(client, session)[place])
        asked(client, f"{session}/tell", losses=losses)
        asked(client, f"{session}/publish", name="perturbed")
        published = sampled("perturbed")
        assert copy["token_ids"] == published["token_ids"]
        assert copy["logprobs"] == pytest.approx(published["logprobs"], abs=1e-5)
        logprobs.append(copy["logprobs"])
        client.delete("/v1/adapters/perturbed")
        client.delete(session)
    assert logprobs[0] != logprobs[1]


def test_each_step_has_copies_of_its_own(client: httpx2.Client) -> None:
    trainable = {"layers": "top:2", "targets": ["q_proj", "v_proj"], "rank": 4}
    session = begin(client, model=GENERATOR, trainable=trainable, estimator={"epsilon": 0.1})
    names_of(client, session)
    asked(client, f"{session}/tell", losses=[1.0, 0.0])
    copies = asked(client, f"{session}/ask")["data"]
    asked(client, f"{session}/publish", name="centre")
    sampling: dict[str, Any] = {"prompts": ["1, 2, 3,"], "max_tokens": 8, "temperature": 0}

    def logprobs(model: str) -> list[float]:
        answer = asked(client, "/v1/rl/rollout", model=model, **sampling)
        return answer["groups"][0]["samples"][0]["logprobs"]

    centre = logprobs("centre")
    plus, minus = (logprobs(copy["name"]) for copy in copies)
    assert plus != minus
    assert centre not in (plus, minus)
    # The next step has other directions, and the published adapter stays as it is.
    asked(client, f"{session}/tell", losses=[1.0, 1.0])
    again = [logprobs(name) for name in names_of(client, session)]
    assert not [each for each in again if each in (plus, minus)]
    assert logprobs("centre") == centre
    client.delete("/v1/adapters/centre")
    client.delete(session)


def test_samples_of_a_generator_are_rewarded(client: httpx2.Client) -> None:
    trainable = {"layers": "all", "targets": ["q_proj", "v_proj"], "rank": 4}
    estimator = {"epsilon": 0.1, "learning_rate": 0.1}
    session = begin(client, model=GENERATOR, trainable=trainable, estimator=estimator)

    def loss(model: str, seed: int) -> float:
        """Return how rare a letter is in samples: less the reward of an environment."""
        prompts = ["1, 2, 3,", "The cat", "Hello"]
        body = {"prompts": prompts, "max_tokens": 8, "seed": seed}
        groups = asked(client, "/v1/rl/rollout", model=model, **body)["groups"]
        texts = [group["samples"][0]["text"] for group in groups]
        return -sum(text.count("e") / max(1, len(text)) for text in texts) / len(texts)

    before = sum(loss(GENERATOR, seed) for seed in range(1000, 1004))
    for number in range(12):
        losses = [loss(name, number * 100) for name in names_of(client, session)]
        asked(client, f"{session}/tell", losses=losses)
    asked(client, f"{session}/publish", name="rewarded")
    after = sum(loss("rewarded", seed) for seed in range(1000, 1004))
    assert after < before
    client.delete("/v1/adapters/rewarded")
    client.delete(session)


def test_steps_that_change_nothing_are_warned_of(client: httpx2.Client, session: str) -> None:
    names_of(client, session)
    asked(client, f"{session}/tell", losses=[1.0, 1.0])
    assert "1 of 1 steps" in client.get(session).json()["warning"]
    for losses in ([1.0, 0.0], [0.0, 1.0]):
        names_of(client, session)
        asked(client, f"{session}/tell", losses=losses)
    assert client.get(session).json()["warning"] is None


def test_what_was_not_asked_cannot_be_told(client: httpx2.Client, session: str) -> None:
    tell = f"{session}/tell"
    assert refused(client, tell, losses=[1.0, 2.0])[0] == 409
    first, second = names_of(client, session)
    assert refused(client, tell, losses=[1.0]) == (400, "losses")
    assert refused(client, tell, losses={first: 1.0}) == (400, "losses")
    assert refused(client, tell, losses={first: 1.0, second: 1.0, "x": 1.0}) == (400, "losses")
    assert refused(client, tell, losses={first: 1.0, second: "1"}) == (400, "losses")
    body = f'{{"losses": {{"{first}": 1.0, "{second}": NaN}}}}'
    assert client.post(tell, content=body).status_code == 400
    assert client.get(session).json()["step"] == 0
    asked(client, tell, losses={second: 1.0, first: 2.0})
    assert client.get(session).json()["last"]["loss_plus"] == 2.0
    assert refused(client, tell, losses=[1.0, 2.0])[0] == 409


def test_sessions_measure_losses_or_are_told(client: httpx2.Client, session: str) -> None:
    assert refused(client, f"{session}/step")[0] == 409
    assert refused(client, f"{session}/run", steps=3)[0] == 409
    rows = [{"text": "a film", "label": "good"}]
    assert refused(client, f"{session}/evaluate", data=rows) == (400, "data")
    body: dict[str, Any] = SESSION | {
        "objective": {"kind": "label_words", "label_words": WORDS},
        "batch_size": 1,
    }
    assert refused(client, "/v1/mezo/sessions", **body) == (400, "data")
    other = begin(client, **body, data=rows)
    assert refused(client, f"{other}/ask")[0] == 409
    asked(client, f"{other}/run", steps=200)
    assert refused(client, f"{other}/ask")[0] == 409
    client.delete(other)
    asked(client, f"{session}/pause")
    assert refused(client, f"{session}/ask")[0] == 409


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"data": [{"text": "a film", "label": "good"}]}, "data"),
        ({"batch_size": 4}, "batch_size"),
        ({"estimator": {"groups": True}}, "estimator.groups"),
        ({"estimator": {"directions": 3}}, "estimator.directions"),
        ({"model": "nothing"}, "model"),
    ],
)
def test_new_sessions_without_data_name_what_is_wrong(
    client: httpx2.Client, changes: dict[str, Any], param: str
) -> None:
    status, named = refused(client, "/v1/mezo/sessions", **(SESSION | changes))
    assert (status, named) == (404 if param == "model" else 400, param)


def test_without_room_nothing_is_served(client: httpx2.Client, session: str) -> None:
    others = [begin(client) for _ in range(2)]
    for other in others:
        names_of(client, other)
    before = adapters(client)
    answer = client.post(f"{session}/ask")
    assert answer.status_code == 409
    assert "--max-cpu-loras" in answer.json()["error"]["message"]
    assert adapters(client) == before
    assert client.get(session).json()["pending"] == []
    for other in others:
        client.delete(other)
    assert adapters(client) == []


@pytest.mark.slow
def test_a_killed_server_repeats_what_it_asked(tmp_path: Path) -> None:
    flags = ("--model", MODEL, "--data-dir", str(tmp_path))
    process = ServerProcess(*flags)
    process.wait_until_ready()
    losses: Sequence[float] = ()
    with httpx2.Client(base_url=process.url, timeout=None) as client:
        session = begin(client)
        names_of(client, session)
        asked(client, f"{session}/tell", losses=[1.0, 0.5])
        names = names_of(client, session)
        losses = [wrongness(client, name) for name in names]
    process.stop(signal.SIGKILL)
    process = ServerProcess(*flags)
    process.wait_until_ready()
    with httpx2.Client(base_url=process.url, timeout=None) as client:
        assert client.get(session).json()["pending"] == names
        assert adapters(client) == []
        assert names_of(client, session) == names
        assert [wrongness(client, name) for name in names] == losses
        (step,) = asked(client, f"{session}/tell", losses=losses)["data"]
        assert step["step"] == 2
    process.stop()
