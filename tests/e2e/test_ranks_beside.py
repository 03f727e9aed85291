"""A world of two beside what it does not share: an embedder, sessions, HTTP processes."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import openai
import pytest

from tests.server_process import ServerProcess

pytestmark = [pytest.mark.one_engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[ServerProcess]:
    models = ["--model", "mlx-parallm-demo", "demo:embed"]
    process = ServerProcess(*models, "--api-server-count", "2", num_ranks=2)
    process.wait_until_ready()
    yield process
    assert process.stop() == 0
    assert [rank.returncode for rank in process.ranks] == [0, 0]


@pytest.fixture(scope="module")
def client(world: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{world.url}/v1", api_key="none") as api:
        yield api


def test_two_http_processes_speak_for_two_ranks(
    world: ServerProcess, client: openai.OpenAI
) -> None:
    assert httpx2.get(f"{world.url}/get_world_size").json() == {"world_size": 2}
    answer = client.chat.completions.create(
        model="mlx-parallm-demo",
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
        max_tokens=64,
        temperature=0,
    )
    assert answer.choices[0].message.content == "17 + 25 = 42"
    assert world.metric("mlx_parallm:ranks") == 2


def test_an_embedder_stays_on_rank_0(client: openai.OpenAI) -> None:
    texts = ["a red circle", "a blue square"]
    both = client.embeddings.create(model="demo:embed", input=texts).data
    alone = [client.embeddings.create(model="demo:embed", input=text).data[0] for text in texts]
    for batched, single in zip(both, alone, strict=True):
        assert batched.embedding == pytest.approx(single.embedding, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/mezo/sessions", {"model": "demo:embed"}),
        ("/v1/training/sessions", {"model": "demo:embed"}),
        ("/v1/fine_tuning/jobs", {"model": "mlx-parallm-demo", "training_file": "file-1"}),
    ],
)
def test_training_is_refused_in_one_sentence(
    world: ServerProcess, path: str, body: dict[str, str]
) -> None:
    answer = httpx2.post(f"{world.url}{path}", json=body)
    assert answer.status_code == 409
    assert "mlx.launch" in answer.json()["error"]["message"]
