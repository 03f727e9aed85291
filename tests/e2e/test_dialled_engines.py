"""`mlx_parallm serve --engine A --engine B`: engines of other machines behind one port."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest

from mlx_parallm.client.tensors import encode_safetensors
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from tests.adapter_files import CONFIG, upload
from tests.listeners import Cable, Listener
from tests.process_memory import has_mlx, on_linux
from tests.processes import are_gone
from tests.server_process import ServerProcess
from tests.weights_files import NAME, weight

MODEL = "mlx-parallm-demo"
ASKED = {"max_tokens": 24, "temperature": 0.8, "seed": 5, "extra_body": {"ignore_eos": True}}
RAW = {"content-type": "application/octet-stream"}
pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers") / "key"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    return path


@pytest.fixture(scope="module")
def listeners(key_file: Path) -> Iterator[list[Listener]]:
    listeners = [Listener("--peer-key-file", str(key_file)) for _ in range(2)]
    yield listeners
    assert [listener.stop() for listener in listeners] == [0, 0]


@pytest.fixture(scope="module")
def cable(listeners: list[Listener]) -> Iterator[Cable]:
    """Yield the cable to the second engine."""
    cable = Cable(listeners[1].address)
    yield cable
    cable.close()


@pytest.fixture(scope="module")
def server(listeners: list[Listener], cable: Cable, key_file: Path) -> Iterator[ServerProcess]:
    addresses = [str(listeners[0].address), str(cable.address)]
    with pytest.MonkeyPatch.context() as patch:
        # `make test-engines` sets it; all engines of this server are dialled.
        patch.delenv("MLX_PARALLM_DATA_PARALLEL_SIZE", raising=False)
        process = ServerProcess(
            *("--engine", *addresses, "--peer-key-file", str(key_file), "--max-num-seqs", "8"),
            is_forked=False,
        )
    process.wait_until_ready()
    yield process
    assert process.stop() == 0


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def texts(client: openai.OpenAI, rank: int | None = None, model: str = MODEL) -> list[str]:
    """Return the answers to prompts that are asked side by side, of one engine or of any."""
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}

    def ask(number: int) -> str:
        prompt = f"{number}, 2, 3,"
        answer = client.completions.create(
            model=model, prompt=prompt, extra_headers=headers, **ASKED
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, range(8)))


def await_ready(server: ServerProcess, count: int) -> None:
    while httpx2.get(f"{server.url}/ready").json()["ready"] != count:
        pass


def test_answers_are_those_of_one_engine(client: openai.OpenAI, live_server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none") as alone:
        expected = texts(alone)
    assert texts(client) == texts(client, 0) == texts(client, 1) == expected


@on_linux
def test_only_the_engines_have_mlx(server: ServerProcess, listeners: list[Listener]) -> None:
    engines = [engine for listener in listeners for engine in listener.engines]
    assert len(engines) == 2
    assert all(map(has_mlx, engines))
    assert not any(has_mlx(process.process.pid) for process in (server, *listeners))


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_an_engine_that_is_lost_comes_back_with_every_change(
    server: ServerProcess,
    client: openai.OpenAI,
    listeners: list[Listener],
    cable: Cable,
    how: str,
) -> None:
    query = {"name": "p", "config": json.dumps(CONFIG)}
    changed = encode_safetensors({NAME: -weight()})
    with httpx2.Client(base_url=server.url) as http:
        sent = http.post("/v1/update_adapter_weights", content=upload(1), params=query, headers=RAW)
        assert sent.status_code == 200, sent.text
        version = {"version": how}
        assert http.post("/update_weights", content=changed, params=version, headers=RAW).is_success
        expected, base = texts(client, 0, "p"), texts(client, 0)
        (lost,) = listeners[1].engines
        # One that an engine has died of would wait until it can run alone.
        body = {"model": MODEL, "prompt": f"{how}: 1,", "stream": True, "max_tokens": 1500}
        streams = [
            client.completions.create(
                **{**body, "extra_body": {"ignore_eos": True}},  # type: ignore[arg-type]
                extra_headers={"X-data-parallel-rank": str(rank)},
            )
            for rank in (0, 1)
        ]
        for stream in streams:
            next(stream)
        if how == "killed":
            os.kill(lost, signal.SIGKILL)
        else:
            cable.cut()
            cable.mend()
        with pytest.raises(openai.APIError):
            list(streams[1])
        assert next(streams[0]).choices[0].text is not None
        streams[0].close()
        await_ready(server, 2)
        assert are_gone([lost])
        assert texts(client, 1, "p") == expected
        assert texts(client, 1) == base
        assert http.delete("/v1/adapters/p").status_code == 200


def refusal(*flags: str) -> str:
    """Return what a server prints that does not start."""
    process = ServerProcess(*flags)
    with pytest.raises(AssertionError, match="the server ended"):
        process.wait_until_ready()
    text = process.log
    assert process.stop() == 2
    return text


def test_who_has_another_key_or_none_gets_no_engine(
    listeners: list[Listener], tmp_path: Path
) -> None:
    address = str(listeners[0].address)
    other = tmp_path / "other"
    other.write_text("f" * 32)
    before = listeners[0].engines
    for flags in ((), ("--peer-key-file", str(other))):
        text = refusal("--engine", address, *flags)
        assert f"--engine {address}: no engine is started there: it does not know" in text
    assert listeners[0].engines == before


def test_a_machine_without_a_key_is_not_dialled() -> None:
    assert "--engine 192.0.2.1:7000 needs --peer-key-file" in refusal("--engine", "192.0.2.1:7000")


def test_a_folder_that_only_the_server_has_is_named(tmp_path: Path) -> None:
    shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    lacking = Listener(program=("tests.machine_without", str(tmp_path / "model")))
    text = refusal("--model", str(tmp_path / "model"), "--engine", str(lacking.address))
    assert f"has no {tmp_path / 'model'}, which the server's machine has" in text
    lacking.stop()


def test_an_update_from_a_folder_that_an_engine_lacks_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "roots" / "new"
    shutil.copytree(DEMO_FOLDER, folder)
    lacking = Listener(program=("tests.machine_without", str(folder)))
    process = ServerProcess(
        *("--engine", str(lacking.address), "--data-parallel-size", "1"),
        *("--allowed-adapter-roots", str(folder.parent)),
    )
    process.wait_until_ready()
    await_ready(process, 2)
    with httpx2.Client(base_url=process.url) as http:
        before = http.get("/weight_info").json()
        refused = http.post("/update_weights", json={"weight_dir": str(folder)})
        assert refused.status_code == 400, refused.text
        assert f"has no {folder}, which the server's machine has" in refused.text
        assert http.get("/weight_info").json() == before
    assert process.stop() == 0
    lacking.stop()


def test_engines_of_both_machines_serve_together(listeners: list[Listener], key_file: Path) -> None:
    process = ServerProcess(
        *("--engine", str(listeners[0].address), "--peer-key-file", str(key_file)),
        *("--data-parallel-size", "1"),
    )
    process.wait_until_ready()
    await_ready(process, 2)
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none") as client:
        assert texts(client, 0) == texts(client, 1)
    before = len(listeners[0].engines)
    assert process.stop() == 0
    while len(listeners[0].engines) == before:
        pass
