"""Adapters over HTTP by ``mlx_parallm.client``, and two steps of the GRPO example."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import httpx2
import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.client import AdapterInfo, RequestFailedError, RLClient, encode_safetensors
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.peers import child_process
from mlx_parallm.types.request import DEFAULT_VERSION
from tests.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.slow

NAME = "client-test"
WIDTH, RANK, NUM_LAYERS = 256, 4, 6
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}
PROMPT = [3062, 274, 198, 50, 52]


def tensors(seed: int, size: float = 0.1) -> dict[str, np.ndarray]:
    """Return a random adapter of the embedded model's query projections, as PEFT names them."""
    random = np.random.default_rng(seed)
    return {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": (
            size * random.standard_normal((RANK, WIDTH) if part == "A" else (WIDTH, RANK))
        ).astype(np.float32)
        for layer in range(NUM_LAYERS)
        for part in "AB"
    }


@pytest.fixture
async def client(live_server: ServerProcess) -> AsyncIterator[RLClient]:
    async with RLClient(live_server.url) as client:
        yield client
        await client.resume()
    await forget_adapters(live_server)


async def put(client: RLClient, seed: int, **options: Any) -> AdapterInfo:
    return await client.update_adapter(NAME, tensors(seed), CONFIG, **options)


async def sampled(client: RLClient, adapter: str | None = NAME) -> tuple[list[float], str]:
    """Return a prompt's log-probabilities and the version that sampled."""
    options: dict[str, Any] = {} if adapter is None else {"adapter": adapter}
    rollout = await client.rollout([PROMPT], max_tokens=1, prompt_logprobs=0, **options)
    logprobs = rollout.groups[0].prompt.logprobs
    assert logprobs is not None

    version = rollout.samples[0].versions[0].version
    return [logprob for logprob in logprobs if logprob is not None], version


async def test_an_adapter_comes_changes_and_goes(client: RLClient) -> None:
    base, version = await sampled(client, None)
    assert version == "default"
    first = await put(client, 1)
    assert (first.version, first.rank, first.live_ms is not None) == ("1", RANK, True)
    before, version = await sampled(client)
    assert version == "1"
    assert np.abs(np.array(before) - base).max() > 1e-3
    second = await put(client, 2, version="step-7", expected_version="1")
    assert second.digest != first.digest
    after, version = await sampled(client)
    assert version == "step-7"
    assert np.abs(np.array(after) - before).max() > 1e-3
    assert [(adapter.name, adapter.version) for adapter in await client.adapters()] == [
        (NAME, "step-7")
    ]
    # The digest depends on the content alone, so equal weights have the same one.
    assert (await put(client, 1)).digest == first.digest
    np.testing.assert_allclose((await sampled(client))[0], before, atol=1e-5)
    await client.unload_adapter(NAME)
    assert await client.adapters() == []
    with pytest.raises(RequestFailedError) as gone:
        await sampled(client)
    assert gone.value.status == 404


async def test_what_is_refused_leaves_the_old_version(client: RLClient) -> None:
    await put(client, 1, version="good")
    before, _ = await sampled(client)
    with pytest.raises(RequestFailedError, match="good") as late:
        await put(client, 2, version="late", expected_version="older")
    assert late.value.status == 412
    assert late.value.param == "expected_version"
    bad = tensors(3)
    next(iter(bad.values()))[0, 0] = np.nan
    with pytest.raises(RequestFailedError, match="finite") as infinite:
        await client.update_adapter(NAME, bad, CONFIG)
    assert infinite.value.status == 400
    assert await sampled(client) == (pytest.approx(before, abs=1e-5), "good")


async def test_a_local_folder_is_uploaded(client: RLClient, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await client.load_adapter(NAME, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(FileNotFoundError, match="adapter_model"):
        await client.load_adapter(NAME, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(encode_safetensors(tensors(5)))
    info = await client.load_adapter(NAME, tmp_path, pinned=True)
    assert info.is_pinned
    assert info.digest == (await put(client, 5)).digest


async def test_an_update_amid_a_pause_shows_in_the_spans(
    client: RLClient, live_server: ServerProcess
) -> None:
    await put(client, 1, version="old")
    running = asyncio.ensure_future(
        client.rollout([PROMPT], adapter=NAME, max_tokens=500, ignore_eos=True, seed=1)
    )
    await until(lambda: live_server.metric("vllm:num_requests_running") > 0)
    assert await client.pause("keep") == 1
    assert await client.is_paused()
    await put(client, 2, version="new", expected_version="old")
    await client.resume()
    assert not await client.is_paused()
    sample = (await running).samples[0]
    assert [span.version for span in sample.versions] == ["old", "new"]
    ends = [span.end for span in sample.versions]
    assert [span.start for span in sample.versions] == [0, ends[0]]
    assert ends[1] == len(sample.token_ids) == 500


async def test_base_weights_change_and_the_server_sleeps(client: RLClient) -> None:
    before, version = await sampled(client, None)
    name = "model.layers.0.input_layernorm.weight"
    original = load_norm(name)
    try:
        assert await client.update_weights({name: original * 2}, version="louder") == "louder"
        assert await client.weight_version() == "louder"
        louder, version = await sampled(client, None)
        assert version == "louder"
        assert np.abs(np.array(louder) - before).max() > 1e-3
        with pytest.raises(RequestFailedError) as late:
            await client.update_weights({name: original}, expected_version=DEFAULT_VERSION)
        assert late.value.status == 412
        await client.sleep(1)
        assert await client.is_paused()
        await client.wake_up()
        assert await sampled(client, None) == (pytest.approx(louder, abs=1e-5), "louder")
    finally:
        await client.update_weights({name: original}, version=DEFAULT_VERSION)
    assert await sampled(client, None) == (pytest.approx(before, abs=1e-5), DEFAULT_VERSION)


def load_norm(name: str) -> np.ndarray:
    tensors: Any = mx.load(str(DEMO_FOLDER / "model.safetensors"))
    return np.array(tensors[name].astype(mx.float32))


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 - another process is asked
        await asyncio.sleep(0.01)


async def forget_adapters(server: ServerProcess) -> None:
    async with RLClient(server.url) as client:
        for info in await client.adapters():
            await client.unload_adapter(info.name)


def run_example(server: ServerProcess, folder: Path, *flags: str) -> list[dict[str, Any]]:
    """Return the example's log."""
    log, plot = folder / "steps.jsonl", folder / "rewards.svg"
    command = ["examples.grpo.train", "--url", server.url, *flags]
    command += ["--problems", "8", "--group-size", "8", "--eval-problems", "8"]
    command += ["--adapter", "example", "--log", str(log), "--plot", str(plot)]
    done = child_process.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    # Other tests share the server.
    asyncio.run(forget_adapters(server))
    assert done.returncode == 0, done.stderr
    assert ET.parse(plot).getroot() is not None
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_two_steps_of_the_example(live_server: ServerProcess, tmp_path: Path) -> None:
    steps = run_example(live_server, tmp_path, "--steps", "2")
    assert [step["versions"] for step in steps] == [["0"], ["1"]]
    # The trainer and the server compute the same policy, before and after an update.
    assert [step["mismatch"] < 1e-3 for step in steps] == [True, True]
    assert all(0 <= step["reward"] <= 1 for step in steps)


def test_the_example_samples_while_it_trains(live_server: ServerProcess, tmp_path: Path) -> None:
    steps = run_example(live_server, tmp_path, "--steps", "3", "--in-flight")
    assert steps[0]["versions"] == ["0"]
    # The rollout began before the first update.
    assert steps[1]["versions"][0] == "0"
    assert steps[1]["mismatch"] is not None


def test_the_example_lets_the_server_sleep(live_server: ServerProcess, tmp_path: Path) -> None:
    steps = run_example(live_server, tmp_path, "--steps", "2", "--sleep")
    assert [step["versions"] for step in steps] == [["0"], ["1"]]
    assert steps[1]["mismatch"] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--in-flight",), ("--kl", "0.02", "--epochs", "2")])
def test_the_example_trains_the_server_itself(
    live_server: ServerProcess, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    steps = run_example(live_server, tmp_path, "--steps", "3", "--on-server", *flags)
    assert steps[0]["versions"] == ["0"]
    # The session computes the policy that has sampled, of its first step and of its second.
    assert steps[0]["mismatch"] < 1e-4
    assert "--in-flight" in flags or steps[2]["mismatch"] < 1e-4
    assert httpx2.get(f"{live_server.url}/v1/training/sessions").json()["data"] == []
