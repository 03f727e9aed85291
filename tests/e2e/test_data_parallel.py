"""`mlx_parallm serve --data-parallel-size 2`: one server, whichever engine computes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_parallm.cli.main import main
from mlx_parallm.machine import num_processors
from tests.adapter_files import CONFIG, upload
from tests.process_memory import MAX_MB, has_mlx, on_linux, resident_mb
from tests.processes import are_gone, engines_of, is_replaced
from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
FLAGS = ("--data-parallel-size", "2", "--max-num-seqs", "8")
pytestmark = pytest.mark.engines
ASKED = {"max_tokens": 24, "temperature": 0.8, "seed": 5, "extra_body": {"ignore_eos": True}}
RAW = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess(*FLAGS, "--model", MODEL, "--model", "demo:embed", is_forked=False)
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def tokens_by_engine(server: ServerProcess, model: str = "mlx-parallm-demo") -> list[float]:
    """Return how many tokens each engine has generated."""
    text = httpx2.get(f"{server.url}/metrics").text
    name = 'vllm:generation_tokens_total{{engine="{}",model_name="{}"}} '
    return [
        float(line.removeprefix(name.format(rank, model)))
        for rank in (0, 1)
        for line in text.splitlines()
        if line.startswith(name.format(rank, model))
    ]


def texts(client: openai.OpenAI, model: str, count: int) -> list[str]:
    """Return the answers to prompts that are asked side by side."""

    def ask(number: int) -> str:
        prompt = f"{number}, 2, 3,"
        answer = client.completions.create(model=model, prompt=prompt, **ASKED)
        return answer.choices[0].text

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(count)))


def digits(client: openai.OpenAI, expected: str) -> str:
    """Return the last digit of what a model writes that may only write ``expected``."""
    answer = client.completions.create(
        model=MODEL, prompt="1,", max_tokens=16, extra_body={"guided_regex": expected}
    )
    assert answer.choices[0].text == expected
    return answer.choices[0].text[-1]


@on_linux
def test_the_servers_own_process_is_small(server: ServerProcess) -> None:
    # The models are loaded, and nothing was asked yet.
    assert not has_mlx(server.process.pid)
    assert resident_mb(server.process.pid) <= MAX_MB
    assert all(has_mlx(engine) for engine in engines_of(server.process.pid))


def test_requests_are_shared_out_and_answered_as_by_one_engine(
    server: ServerProcess, client: openai.OpenAI, live_server: ServerProcess
) -> None:
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none") as alone:
        assert texts(client, MODEL, 12) == texts(alone, MODEL, 12)
    shares = tokens_by_engine(server)
    assert sum(shares) == 12 * ASKED["max_tokens"]  # type: ignore[operator]
    assert min(shares) >= 3 * ASKED["max_tokens"]  # type: ignore[operator]
    vectors = client.embeddings.create(model="demo:embed", input=["a", "a", "b"]).data
    assert vectors[0].embedding == vectors[1].embedding != vectors[2].embedding


def samples_of(client: openai.OpenAI, *, stream: bool) -> tuple[dict[int, str], list[float]]:
    """Return 16 texts of one prompt by their indices, and the log-probabilities of all tokens."""
    body = {"model": MODEL, "prompt": "16 of these: 1, 2,", "n": 16, "logprobs": 2, **ASKED}
    texts: dict[int, str] = dict.fromkeys(range(16), "")
    logprobs: dict[int, list[float]] = {index: [] for index in range(16)}
    answer: Any = client.completions.create(stream=stream, **body)
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                logprobs[choice.index] += choice.logprobs.token_logprobs or []
    return texts, [value for index in range(16) for value in logprobs[index]]


@pytest.mark.parametrize("stream", [False, True])
def test_samples_of_one_request_are_shared_out_and_are_those_of_one_engine(
    server: ServerProcess, client: openai.OpenAI, live_server: ServerProcess, stream: bool
) -> None:
    before = tokens_by_engine(server)
    shared, logprobs = samples_of(client, stream=stream)
    assert all(now > then for now, then in zip(tokens_by_engine(server), before, strict=True))
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none") as alone:
        expected, expected_logprobs = samples_of(alone, stream=stream)
    assert shared == expected
    assert len(set(shared.values())) > 8
    assert len(logprobs) == 16 * ASKED["max_tokens"]  # type: ignore[operator]
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)


def inputs_by_engine(server: ServerProcess) -> list[float]:
    """Return how many inputs each engine has been asked to embed."""
    families = text_string_to_metric_families(httpx2.get(f"{server.url}/metrics").text)
    values = {
        sample.labels["engine"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "mlx_parallm:encoder_inputs_total"
    }
    return [values[rank] for rank in sorted(values)]


def long_texts(name: str) -> list[str]:
    """Return texts of very different lengths, no two equal."""
    return [
        " ".join([f"{name} {number}.", *["A baker works."] * (number % 13)]) for number in range(64)
    ]


@pytest.mark.parametrize(
    ("path", "body", "values"),
    [
        (
            "/v1/embeddings",
            {"model": "demo:embed", "input": long_texts("a")},
            lambda answer: [row["embedding"] for row in answer["data"]],
        ),
        ("/embed", {"model": "demo:embed", "inputs": long_texts("b")}, lambda answer: answer),
        (
            "/pipeline/feature-extraction/demo:embed",
            {"inputs": long_texts("c")},
            lambda answer: answer,
        ),
        (
            "/v1/score",
            {"model": "demo:embed", "text_1": "A bakery?", "text_2": long_texts("d")},
            lambda answer: [[row["score"]] for row in answer["data"]],
        ),
    ],
)
def test_the_inputs_of_one_request_are_shared_out_on_every_route(
    server: ServerProcess, path: str, body: dict[str, Any], values: Callable[[Any], Any]
) -> None:
    with httpx2.Client(base_url=server.url, timeout=None) as http:

        def ask(headers: dict[str, str]) -> Any:
            answer = http.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return values(answer.json())

        before = inputs_by_engine(server)
        divided = ask({})
        shares = [now - then for now, then in zip(inputs_by_engine(server), before, strict=True)]
        # Each engine has kept its own part, so both together compute all inputs in other batches.
        wholes = [ask({"X-data-parallel-rank": rank}) for rank in "01"]
    assert min(shares) > 16
    for mine, *others in zip(divided, *wholes, strict=True):
        for other in others:
            np.testing.assert_allclose(np.squeeze(mine), np.squeeze(other), atol=1e-5)


def test_a_client_may_choose_the_engine(server: ServerProcess) -> None:
    with httpx2.Client(base_url=server.url) as http:
        for rank in (1, 0):
            before = tokens_by_engine(server)
            body = {"model": MODEL, "prompt": "1, 2,", "max_tokens": 5, "ignore_eos": True, "n": 4}
            headers = {"X-data-parallel-rank": str(rank)}
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
            sglang = {
                "input_ids": [5, 6],
                "sampling_params": {"max_new_tokens": 5, "ignore_eos": True},
                "data_parallel_rank": rank,
            }
            assert http.post("/generate", json=sglang).status_code == 200
            vectors = {"model": "demo:embed", "input": "a"}
            assert http.post("/v1/embeddings", json=vectors, headers=headers).status_code == 200
            before[rank] += 25
            assert tokens_by_engine(server) == before
        for wrong in ("2", "-1", "one", "99999999999"):
            headers = {"X-data-parallel-rank": wrong}
            refused = http.post("/v1/completions", json=body, headers=headers)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "X-data-parallel-rank"
        refused = http.post("/generate", json={**sglang, "routed_dp_rank": 2})
        assert (refused.status_code, "routed_dp_rank" in refused.text) == (400, True)


def test_the_state_of_each_engine_is_reported(server: ServerProcess) -> None:
    with httpx2.Client(base_url=server.url) as http:
        assert http.get("/ready").json()["ready"] == 2
        assert http.get("/get_world_size").json() == {"world_size": 2}
        info = http.get("/get_server_info").json()
        assert info["dp_size"] == 2
        assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 2
        assert info["max_running_requests"] == 2 * 8
        tokens = [each["max_total_num_tokens"] for each in info["engines"]]
        assert info["max_total_num_tokens"] == sum(tokens)
        assert http.post("/pause", params={"mode": "keep"}).status_code == 200
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1}
        with ThreadPoolExecutor(3) as pool:
            waiting = [
                pool.submit(
                    httpx2.post,
                    f"{server.url}/v1/completions",
                    json=body,
                    headers={"X-data-parallel-rank": str(rank)},
                )
                for rank in (1, 1, 0)
            ]
            while (loads := http.get("/v1/loads").json())["aggregate"]["total_reqs"] < len(waiting):
                pass
            assert http.post("/resume").status_code == 200
        assert [answer.result().status_code for answer in waiting] == [200] * 3
        assert [each["dp_rank"] for each in loads["loads"]] == [0, 1]
        assert [each["state"] for each in loads["loads"]] == ["ready", "ready"]
        assert [each["num_waiting_reqs"] for each in loads["loads"]] == [1, 2]
        assert [each["max_total_num_tokens"] for each in loads["loads"]] == tokens
        assert loads["aggregate"]["total_reqs"] == 3
        chosen = http.get("/v1/loads", params={"dp_rank": 1}).json()["loads"]
        assert [each["dp_rank"] for each in chosen] == [1]


def test_metrics_can_be_read_by_prometheus(server: ServerProcess) -> None:
    text = httpx2.get(f"{server.url}/metrics").text
    families = list(text_string_to_metric_families(text))
    ranks: dict[str, set[str]] = {}
    for sample in (sample for family in families for sample in family.samples):
        if "engine" in sample.labels:
            ranks.setdefault(sample.name, set()).add(sample.labels["engine"])
    assert set(map(frozenset, ranks.values())) == {frozenset({"0", "1"})}
    assert {"vllm:cache_config_info", "mlx_parallm:adapter_slots"} <= ranks.keys()
    assert len({family.name for family in families}) == len(families)


def test_the_memory_of_a_model_is_that_of_all_engines(server: ServerProcess) -> None:
    alone = ServerProcess("--data-parallel-size", "1")
    alone.wait_until_ready()
    several, single = (
        httpx2.get(f"{each.url}/get_server_info").json()["models"][0]["memory"]
        for each in (server, alone)
    )
    alone.stop()
    assert several["weights"] == 2 * single["weights"] > 0
    # The engines divide 128 MiB (tests/server_process.py).
    assert several["kv"] == pytest.approx(128 << 20, rel=0.01)


def test_adapters_are_those_of_every_engine(server: ServerProcess, client: openai.OpenAI) -> None:
    query = {"name": "p", "config": json.dumps(CONFIG)}
    with httpx2.Client(base_url=server.url) as http:
        sent = http.post("/v1/update_adapter_weights", content=upload(1), params=query, headers=RAW)
        assert sent.status_code == 200, sent.text
        before = tokens_by_engine(server)
        with_adapter = texts(client, "p", 12)
        assert all(now > then for now, then in zip(tokens_by_engine(server), before, strict=True))
        assert with_adapter != texts(client, MODEL, 12)
        assert http.delete("/v1/adapters/p").status_code == 200
        gone = http.post("/v1/completions", json={"model": "p", "prompt": "1"})
        assert gone.status_code == 404


def test_an_engine_that_was_killed_comes_back_with_its_adapters(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    query = {"name": "p", "config": json.dumps(CONFIG)}
    with httpx2.Client(base_url=server.url) as http:
        http.post("/v1/update_adapter_weights", content=upload(1), params=query, headers=RAW)
        expected = texts(client, "p", 8)
        before = engines_of(server.process.pid)
        for killed in before:
            os.kill(killed, signal.SIGKILL)
            assert http.get("/health").status_code == 200
            # Another engine may have taken its place before the number was read.
            while http.get("/ready").json()["ready"] == 2 and not is_replaced(
                server.process.pid, killed
            ):
                pass
            # The other engine answers requests and compiles grammars in the meantime.
            assert texts(client, "p", 8) == expected
            assert [digits(client, f"{killed}{number}") for number in "1234"] == list("1234")
            # A command is carried out by all engines, so it waits for the new one.
            while not is_replaced(server.process.pid, killed):
                assert http.get("/v1/adapters").status_code == 200
            while server.log.count("is ready") < len(before) + before.index(killed) + 1:
                assert http.get("/health").status_code == 200
            while http.get("/ready").json()["ready"] != 2:
                pass
        assert not set(before) & set(engines_of(server.process.pid))
        assert texts(client, "p", 8) == expected
        assert min(tokens_by_engine(server)) > 0


def test_doctor_measures_how_many_engines_pay(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", MODEL, "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "256"]
    assert main(["doctor", "--engines", "--json", *flags]) == 0
    report = json.loads(capfd.readouterr().out)
    measured = [row["engines"] for row in report["rows"]]
    assert measured[:2] == ([1, 2] if num_processors() > 1 else [1])
    assert all(row["tokens_per_s"] > 0 for row in report["rows"])
    first, *others = [row["memory_bytes"] for row in report["rows"]]
    # The KV is divided, the weights are not.
    assert all(first < both < 2 * first for both in others)
    assert report["flags"] == f"--data-parallel-size {report['recommended']}"


def test_a_server_that_is_told_to_stop_ends_its_streams_and_its_processes() -> None:
    process = ServerProcess(*FLAGS, "--api-server-count", "2", "--model", MODEL)
    process.wait_until_ready()
    engines = engines_of(process.process.pid)
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client:
        streams = [
            client.completions.create(model=MODEL, prompt="1,", stream=True, **ASKED)
            for _ in range(4)
        ]
        for stream in streams:
            next(stream)
        process.process.send_signal(signal.SIGTERM)
        # What has begun is finished before the processes end.
        reasons = [[part.choices[0].finish_reason for part in stream][-1] for stream in streams]
    assert reasons == ["length"] * 4
    assert process.stop() == 0
    assert len(engines) == 2
    assert are_gone(engines)


def test_every_process_ends_with_its_server(server: ServerProcess) -> None:
    # The last test of this module: there is no server after it.
    engines = engines_of(server.process.pid)
    assert len(engines) == 2, server.log
    server.process.kill()
    server.process.wait()
    command = ["ps", "-o", "stat=", "-p", ",".join(map(str, engines))]
    while any(
        state and not state.startswith("Z")
        for state in subprocess.run(command, capture_output=True, text=True).stdout.split()
    ):
        pass
