"""A policy on a server of its own, trained and brought up to date in each of the ways."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx2
import mlx.core as mx
import pytest

from mlx_parallm.art.config import Devices, ServerConfig, WeightSync
from mlx_parallm.art.server import CheckpointError, UnservedStepError
from mlx_parallm.art.serving import EMBEDDED_MODEL, Address, ServedPolicy
from mlx_parallm.client import RequestFailedError
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from tests.adapter_files import save

pytestmark = pytest.mark.slow

KEY = "art-key"
SHARED = Devices(inference=(0,), training=(0,))
SPLIT = Devices(inference=(0,), training=(1,))
SPLIT_OF_TWO = Devices(inference=(0, 1), training=(2,))
# A small context and one sequence at a time start faster.
FLAGS = ("--max-num-seqs", "4", "--client-timeout", "0")
NEVER_S = 1e6


def save_model(folder: Path, step: int) -> None:
    """Save the embedded model with other weights in its last norm."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO_FOLDER / name).read_bytes())
    tensors = mx.load(str(DEMO_FOLDER / "model.safetensors"))
    assert isinstance(tensors, dict)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * (1 + 0.2 * step)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


class Trainee:
    """A policy, and what its server answers."""

    def __init__(
        self,
        folder: Path,
        method: WeightSync,
        devices: Devices,
        num_engines: int = 1,
        num_ranks: int = 1,
    ) -> None:
        config = ServerConfig(
            weight_sync_method=method,
            data_parallel_size=num_engines,
            tensor_parallel_size=num_ranks,
            context_length=256,
            mem_fraction_static=0.02,
            flush_cache_on_sync=True,
            server_timeout=NEVER_S,
            flags=FLAGS,
        )
        self.policy = ServedPolicy("policy", EMBEDDED_MODEL, folder, config, devices)
        self.statuses: list[int | str] = []

    async def answer(self, step: int | None = None) -> list[float]:
        """Return the log-probabilities of some greedy tokens."""
        body = {
            "model": self.policy.inference_name(step),
            "prompt": "1, 2, 3,",
            "max_tokens": 4,
            "temperature": 0,
            "logprobs": 0,
        }
        answer = await self.ask("POST", "/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["logprobs"]["token_logprobs"]

    async def ask(self, method: str, path: str, body: object = None) -> httpx2.Response:
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx2.AsyncClient(headers=headers) as client:
            return await client.request(method, self.policy.url + path, json=body)

    async def train(self, step: int, previous: Path | None, target: Path) -> Mapping[str, float]:
        """Query the server in place of training."""
        assert (previous is None) == (step == 1)
        try:
            self.statuses.append((await self.ask("GET", "/is_sleeping")).json()["is_sleeping"])
        except Exception as error:  # noqa: BLE001 - whatever says that there is none
            self.statuses.append(type(error).__name__)
        if self.policy._config.weight_sync_method is WeightSync.DISK:
            save_model(target, step)
        else:
            save(target, seed=step)
        return {"loss": 1.0 / step}


@pytest.fixture
async def trainee(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Trainee]:
    method, devices, *sizes = request.param
    trainee = Trainee(tmp_path, method, devices, *sizes)
    await trainee.policy.start(Address(api_key=KEY))
    yield trainee
    await trainee.policy.stop()


CASES = [
    pytest.param((WeightSync.LORA, SHARED), id="lora"),
    pytest.param((WeightSync.DISK, SHARED), id="disk"),
    pytest.param((WeightSync.RESTART, SHARED), id="restart"),
    pytest.param((WeightSync.LORA, SHARED, 2), id="lora-2", marks=pytest.mark.engines),
    pytest.param((WeightSync.DISK, SHARED, 2), id="disk-2", marks=pytest.mark.engines),
]


@pytest.mark.parametrize("trainee", CASES, indirect=True)
async def test_shared_mode(trainee: Trainee) -> None:
    """Check that memory is freed, and the trained step served, or the old one after a failure."""
    policy, keeps = trainee.policy, trainee.policy._config.weight_sync_method is WeightSync.LORA
    before = await trainee.answer()
    assert await policy.train(trainee.train) == (1, {"loss": 1.0})
    first = await trainee.answer()
    assert first != before
    assert policy.step == 1
    slept = "BackendError" if policy._restarts else True
    assert trainee.statuses == [slept]

    async def fail(step: int, previous: Path | None, target: Path) -> Mapping[str, float]:
        assert (step, previous is not None) == (2, True)
        (target / "half").write_text("")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await policy.train(fail)
    assert (policy.step, policy.checkpoints.latest()) == (1, 1)
    assert await trainee.answer() == pytest.approx(first, abs=1e-4)
    if keeps:
        assert await trainee.answer(0) == pytest.approx(before, abs=1e-4)
    else:
        with pytest.raises(UnservedStepError):
            await trainee.answer(0)


@pytest.mark.one_engine
@pytest.mark.parametrize(
    "trainee", [(method, SHARED, 1, 2) for method in WeightSync], ids=str, indirect=True
)
async def test_all_ranks_get_a_step(trainee: Trainee) -> None:
    assert (await trainee.ask("GET", "/get_world_size")).json() == {"world_size": 2}
    before = await trainee.answer()
    await trainee.policy.train(trainee.train)
    assert trainee.policy.step == 1
    assert await trainee.answer() != before


@pytest.mark.parametrize(
    "trainee",
    [
        (WeightSync.LORA, SPLIT),
        pytest.param((WeightSync.LORA, SPLIT_OF_TWO, 2), marks=pytest.mark.engines),
    ],
    indirect=True,
)
async def test_split_mode(trainee: Trainee) -> None:
    """Check that the server answers during training, and refuses what it cannot use."""
    policy = trainee.policy
    await policy.train(trainee.train)
    assert trainee.statuses == [False]
    first = await trainee.answer()

    async def whole_model(step: int, _: Path | None, target: Path) -> Mapping[str, float]:
        save_model(target, step)
        return {}

    with pytest.raises(CheckpointError, match="lora"):
        await policy.train(whole_model)

    async def broken(step: int, _: Path | None, target: Path) -> Mapping[str, float]:
        save(target, seed=step)
        (target / "adapters.safetensors").write_bytes(b"broken")
        return {}

    with pytest.raises(RequestFailedError):
        await policy.train(broken)
    assert policy.step == 1
    assert await trainee.answer() == pytest.approx(first, abs=1e-4)
    await policy.forget(2)
    # A restarted server has the latest step.
    await policy.start(Address(api_key=KEY))
    assert (policy.step, policy.inference_name()) == (1, "policy@1")
    assert await trainee.answer() == pytest.approx(first, abs=1e-4)
    log = json.dumps((policy.checkpoints.root.parent / "logs" / "mlx_parallm.log").read_text())
    assert KEY not in log
