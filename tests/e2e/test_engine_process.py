"""`mlx_parallm serve --engine-process`: the same answers from two processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.adapter_files import CONFIG, upload
from tests.processes import are_gone, engines_of
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

MODEL = "mlx-parallm-demo"
FLAGS = ("--engine-process", "--max-num-seqs", "8")
ASKED = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess(*FLAGS, "--model", MODEL, "--model", "demo:embed")
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def engine_of(server: ServerProcess) -> int:
    """Return the id of the process that a server has started."""
    (engine,) = engines_of(server.process.pid)
    return engine


def test_answers_are_those_of_one_process(
    client: openai.OpenAI, live_server: ServerProcess
) -> None:
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none") as alone:
        here, there = (
            connected.completions.create(
                model=MODEL, prompt="1, 2, 3,", logprobs=2, **ASKED
            ).choices[0]
            for connected in (client, alone)
        )
    assert here.text == there.text
    assert here.logprobs is not None
    assert here.logprobs == there.logprobs
    stream = client.completions.create(model=MODEL, prompt="1, 2, 3,", stream=True, **ASKED)
    assert "".join(chunk.choices[0].text for chunk in stream) == here.text
    vectors = client.embeddings.create(model="demo:embed", input=["a", "a", "b"]).data
    assert vectors[0].embedding == vectors[1].embedding != vectors[2].embedding


def test_grammars_are_compiled_in_the_other(client: openai.OpenAI) -> None:
    def ask(pattern: str) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="1", max_tokens=8, extra_body={"guided_regex": pattern}
        )
        return answer.choices[0].text

    assert ask("(red|green)!") in ("red!", "green!")
    assert ask("(red|green)!") in ("red!", "green!")
    with pytest.raises(openai.BadRequestError) as refusal:
        ask("(")
    assert refusal.value.param == "guided_regex"


def test_adapters_and_encoders_come_and_go(server: ServerProcess, client: openai.OpenAI) -> None:
    raw = {"content-type": "application/octet-stream"}
    query = {"name": "p", "config": json.dumps(CONFIG)}
    with httpx2.Client(base_url=server.url) as http:
        sent = http.post("/v1/update_adapter_weights", content=upload(1), params=query, headers=raw)
        assert sent.status_code == 200, sent.text
        texts = {
            name: client.completions.create(model=name, prompt="1, 2, 3,", **ASKED).choices[0].text
            for name in (MODEL, "p")
        }
        assert texts[MODEL] != texts["p"]
        metrics = http.get("/metrics").text
        assert 'mlx_parallm:adapter_slots_used{model_name="mlx-parallm-demo"} 1.0' in metrics
        assert http.delete("/v1/adapters/p").status_code == 200
        loaded = http.post("/v1/models/load", json={"model": "demo:sentiment"})
        assert loaded.status_code == 200, loaded.text
        answer = http.post("/classify", json={"model": "demo:sentiment", "input": "fine"})
        assert answer.status_code == 200, answer.text
        gone = http.post("/v1/models/unload", json={"model": "demo:sentiment"})
        assert gone.status_code == 200, gone.text


def adapters_of_requests(http: httpx2.Client) -> dict[str, str]:
    """Return the labels of the metric that gateways route by."""
    (family,) = (
        family
        for family in text_string_to_metric_families(http.get("/metrics").text)
        if family.name == "vllm:lora_requests_info"
    )
    (sample,) = family.samples
    assert sample.value > 1.7e9
    return sample.labels


def test_gateways_see_the_adapters_of_requests(server: ServerProcess) -> None:
    query = {"name": "gateway", "config": json.dumps(CONFIG)}
    raw = {"content-type": "application/octet-stream"}
    body = {"model": "gateway", "prompt": "1", "max_tokens": 1}
    endless = body | {"max_tokens": 7000, "ignore_eos": True, "stream": True}
    none = {"max_lora": "8", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    with httpx2.Client(base_url=server.url) as http, ThreadPoolExecutor(1) as pool:
        sent = http.post("/v1/update_adapter_weights", content=upload(1), params=query, headers=raw)
        assert sent.status_code == 200, sent.text
        assert adapters_of_requests(http) == none
        with http.stream("POST", "/v1/completions", json=endless) as response:
            next(response.iter_lines())
            assert adapters_of_requests(http) == none | {"running_lora_adapters": "gateway"}
        while adapters_of_requests(http) != none:
            pass
        http.post("/pause", params={"mode": "keep"})
        queued = pool.submit(http.post, "/v1/completions", json=body)
        while adapters_of_requests(http) != none | {"waiting_lora_adapters": "gateway"}:
            assert not queued.done()
        http.post("/resume")
        assert queued.result().status_code == 200
        assert http.delete("/v1/adapters/gateway").status_code == 200


def test_a_dropped_stream_frees_its_blocks(server: ServerProcess) -> None:
    body = {"model": MODEL, "prompt": "count", "max_tokens": 7000, "stream": True}
    with httpx2.Client(base_url=server.url) as http:
        with http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response:
            next(response.iter_lines())
        for _ in range(1000):
            if server.metric("vllm:num_requests_running") == 0:
                break
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_signal_to_both_lets_a_running_request_finish() -> None:
    server = ServerProcess(*FLAGS, "--shutdown-timeout", "60", is_forked=False)
    server.wait_until_ready()
    engine = engine_of(server)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model=MODEL, prompt="go", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        for process in (engine, server.process.pid):
            os.kill(process, signal.SIGINT)
        last = [chunk for chunk in stream if chunk.choices][-1]
    assert last.choices[0].finish_reason == "length"
    assert server.stop() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


@pytest.mark.parametrize("flags", [("--engine-process",), ("--data-parallel-size", "2")])
@pytest.mark.parametrize("num_signals", [1, 2])
def test_signals_end_a_server_whose_engine_hangs(flags: tuple[str, ...], num_signals: int) -> None:
    timeout = "0" if num_signals == 1 else "3600"
    server = ServerProcess(*flags, "--shutdown-timeout", timeout, is_forked=False)
    server.wait_until_ready()
    engines = engines_of(server.process.pid)
    for engine in engines:
        os.kill(engine, signal.SIGSTOP)
    body = {"model": MODEL, "prompt": "go", "max_tokens": 4}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx2.post, f"{server.url}/v1/completions", json=body)
        # Whichever engine has it, none answers.
        while server.metric("mlx_parallm:engine_ready") > 0:
            pass
        server.process.send_signal(signal.SIGTERM)
        if num_signals == 2:
            while "shutting down" not in server.log:
                pass
        assert server.stop() == 0
        waiting.exception()
    assert are_gone(engines)


def test_the_server_ends_with_its_engine() -> None:
    server = ServerProcess(*FLAGS, is_forked=False)
    server.wait_until_ready()
    engine = engine_of(server)
    body = {"model": MODEL, "prompt": "go", "max_tokens": 7000, "stream": True, "ignore_eos": True}
    with (
        httpx2.Client(base_url=server.url) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        os.kill(engine, signal.SIGKILL)
        log = "".join(lines)
    assert "The engine thread died." in log
    assert server.process.wait() == 1
    server.stop()
