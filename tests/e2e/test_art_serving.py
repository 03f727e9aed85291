"""A policy on a server of its own, trained and brought up to date in each of the ways."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import mlx.core as mx
import pytest
from openai.types.chat.chat_completion import Choice

from mlx_parallm.art.backend import MLXParallmBackend
from mlx_parallm.art.config import Devices, ServerConfig, WeightSync
from mlx_parallm.art.server import BackendError, CheckpointError, UnservedStepError
from mlx_parallm.art.serving import EMBEDDED_MODEL, Address, ServedPolicy
from mlx_parallm.art.training import ServerTrainer, TrainJob
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


class Agent:
    """Rolls out and trains by a backend, as ART does, with stand-ins of ART's types."""

    def __init__(self, folder: Path, method: WeightSync = WeightSync.LORA) -> None:
        config = ServerConfig(
            weight_sync_method=method,
            context_length=256,
            mem_fraction_static=0.02,
            server_timeout=NEVER_S,
            flags=FLAGS,
        )
        self.trainer = ServerTrainer(rank=4, learning_rate=1e-3, minibatch=4)
        self.backend = MLXParallmBackend(
            self.trainer,
            path=folder,
            inference_device=0,
            training_devices=[0],
            server_config=config,
        )
        self.model = SimpleNamespace(
            name="policy",
            project="p",
            base_model=EMBEDDED_MODEL,
            trainable=True,
            _storage_name=lambda: "run-1",
        )
        self.policy = self.backend._policy(self.model)

    async def ask(self, path: str, body: object = None) -> Any:
        async with httpx2.AsyncClient(timeout=None) as client:
            answer = await client.request(
                "GET" if body is None else "POST", self.policy.url + path, json=body
            )
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def group(self, *, exact: bool = True, thinks: bool = True) -> list[SimpleNamespace]:
        """Return a group of trajectories of which the longest answers are the best."""
        messages = [{"role": "user", "content": "SUM 381 563"}]
        answer = await self.ask(
            "/v1/chat/completions",
            {
                "model": self.policy.inference_name(),
                "messages": messages,
                "n": 4,
                "seed": 3,
                "max_tokens": 6,
                "logprobs": True,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "chat_template_kwargs": {"enable_thinking": thinks},
            },
        )
        trajectories = []
        for number, choice in enumerate(answer["choices"]):
            choice["prompt_token_ids"] = answer["prompt_token_ids"]
            if not exact:
                del choice["prompt_token_ids"], choice["token_ids"]
            trajectories.append(
                SimpleNamespace(
                    messages_and_choices=[*messages, Choice.model_validate(choice)],
                    tools=None,
                    reward=float(number),
                )
            )
        return trajectories

    async def sessions(self) -> list[dict[str, Any]]:
        return (await self.ask("/v1/training/sessions"))["data"]


@pytest.fixture
async def agent(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Agent]:
    agent = Agent(tmp_path, getattr(request, "param", WeightSync.LORA))
    await agent.policy.start(Address())
    yield agent
    await agent.backend.close()


@pytest.mark.parametrize("agent", [WeightSync.LORA, WeightSync.RESTART], indirect=True)
async def test_the_server_is_trained_while_it_serves(agent: Agent) -> None:
    served: list[int] = []

    async def serving(job: TrainJob) -> Mapping[str, float]:
        metrics = await agent.trainer(job)
        served.append(len(await agent.group()))
        return metrics

    agent.backend._trainer = serving
    for step, exact in ((1, True), (2, False)):
        # Prompts without tokens are written by the server as it has written them before.
        group = await agent.group(exact=exact)
        made, metrics = await agent.backend._train("rl", agent.model, [group], {})
        assert made == step == agent.policy.step
        assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
        assert (metrics["samples"], metrics["reward"]) == (4.0, 1.5)
        assert agent.policy.inference_name() == f"policy@{step}"
    assert served == [4, 4]
    (session,) = await agent.sessions()
    assert (session["step"], session["config"]["objective"]["kind"]) == (2, "policy")
    assert (agent.policy.checkpoints.folder(2) / "adapter_config.json").is_file()  # type: ignore[operator]


async def test_a_step_that_failed_is_not_learnt(agent: Agent) -> None:
    await agent.backend._train("rl", agent.model, [await agent.group()], {})
    (before,) = await agent.sessions()
    before_training = await agent.group()

    async def fail(job: TrainJob) -> Mapping[str, float]:
        await agent.trainer(job)
        raise ZeroDivisionError

    own, agent.backend._trainer = agent.backend._trainer, fail
    with pytest.raises(ZeroDivisionError):
        await agent.backend._train("rl", agent.model, [before_training], {})
    agent.backend._trainer = own
    _, metrics = await agent.backend._train("rl", agent.model, [before_training], {})
    # The policy that sampled is trained, by another session than the one that went on.
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
    (after,) = await agent.sessions()
    assert (after["id"] != before["id"], after["config"]["adapter"]) == (True, "policy@1")


async def test_the_server_imitates_trajectories_and_goes_on_with_rewards(agent: Agent) -> None:
    config = SimpleNamespace(learning_rate=[1e-3, 2e-3], batch_size=2, assistant_turns="last")
    data = await agent.group(thinks=False)
    _, first = await agent.backend._train("sft", agent.model, data, {"config": config})
    _, second = await agent.backend._train("sft", agent.model, data, {"config": config})
    assert second["loss"] < first["loss"]
    _, metrics = await agent.backend._train("rl", agent.model, [await agent.group()], {})
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
    (session,) = await agent.sessions()
    assert session["config"]["objective"]["kind"] == "policy"


async def test_what_cannot_be_learnt_says_why(agent: Agent) -> None:
    group = await agent.group()
    for trajectory in group:
        trajectory.messages_and_choices[-1].logprobs = None
    with pytest.raises(BackendError, match="logprobs=True"):
        await agent.backend._train("rl", agent.model, [group], {})
    group = await agent.group()
    with pytest.raises(BackendError, match="no option loss_fn"):
        await agent.backend._train("rl", agent.model, [group], {"loss_fn": "ppo"})
    for trajectory in group:
        trajectory.reward = 1.0
    # Equal rewards teach nothing, and the step is the same policy.
    step, metrics = await agent.backend._train("rl", agent.model, [group], {})
    assert (step, metrics) == (1, {"reward": 1.0, "samples": 0.0})


async def test_a_paused_session_is_replaced(agent: Agent) -> None:
    await agent.backend._train("rl", agent.model, [await agent.group()], {})
    (before,) = await agent.sessions()
    await agent.ask(f"/v1/training/sessions/{before['id']}/pause", {})
    _, metrics = await agent.backend._train("rl", agent.model, [await agent.group()], {})
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
    (after,) = await agent.sessions()
    assert after["id"] != before["id"]
