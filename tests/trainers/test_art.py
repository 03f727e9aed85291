"""ART's models, clients and services: step and in-flight modes, and a backend of this server."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.machinery
import math
import os
import sys
import types
from unittest.mock import MagicMock

import art
import httpx
import pytest
from art.openai import consume_chat_completion_stream
from art.serving_capabilities import ServingCapabilities, discover_serving_capabilities
from art.vllm_runtime import wait_for_vllm_http_runtime
from exercises import SUM, user, write_peft_adapter

from mlx_parallm.art import DeviceConfig, MLXParallmBackend, ServerConfig, TrainJob

PYTHON = os.environ["TRAINERS_SERVER_PYTHON"]
NAME = "art-policy"


async def trainer(job: TrainJob) -> dict[str, float]:
    """Write a random adapter in place of training, from data of the kind that ART passes."""
    rewards = [trajectory.reward for group in job.data for trajectory in group.trajectories]
    for group in job.data:
        for trajectory in group.trajectories:
            check_choice(trajectory.messages_and_choices[-1])
    write_peft_adapter(job.target, seed=job.step, scale=0.2)
    return {"reward": sum(rewards) / len(rewards), "step": float(job.step)}


def check_choice(choice):
    ids, logprobs = choice.token_ids, [token.logprob for token in choice.logprobs.content]
    assert len(ids) == len(logprobs) > 0
    assert all(math.isfinite(logprob) for logprob in logprobs)
    assert [token.token for token in choice.logprobs.content] == [
        f"token_id:{token_id}" for token_id in ids
    ]


async def rollout(model, *, step=None, **more):
    """Return an answer through the client that ART passes to agents; its extras are ART's."""
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step),
        messages=[user(SUM)],
        logprobs=True,
        max_tokens=8,
        **more,
    )
    assert answer.prompt_token_ids
    check_choice(answer.choices[0])
    return art.Trajectory(
        messages_and_choices=[user(SUM), answer.choices[0]],
        reward=float(len(answer.choices[0].message.content or "")),
    )


def texts(trajectory):
    return [token.logprob for token in trajectory.messages_and_choices[-1].logprobs.content]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "split"])
def test_backend(tmp_path, shared):
    """Register, roll out, train twice, name steps and delete, by ART's own model class."""
    asyncio.run(
        _use_backend(
            tmp_path,
            DeviceConfig(
                inference_device=0, training_devices=(0,) if shared else (1,), auto_detect=False
            ),
        )
    )


async def _use_backend(path, devices):
    model = art.TrainableModel(
        name=NAME, run_name="run-1", project="p", base_model="mlx-parallm-demo"
    )
    config = ServerConfig(python=PYTHON, context_length=1024, mem_fraction_static=0.3)
    async with MLXParallmBackend(
        trainer, path=path, device_config=devices, server_config=config
    ) as backend:
        await model.register(backend)
        assert model.get_inference_name() == f"{NAME}@0"
        assert await model.get_step() == 0
        before = await rollout(model, temperature=0)
        for step in (1, 2):
            group = art.TrajectoryGroup(
                await asyncio.gather(*(rollout(model, seed=seed) for seed in range(3)))
            )
            result = await backend.train(model, [group], learning_rate=1e-5)
            assert (result.step, await model.get_step()) == (step, step)
            assert result.metrics["step"] == step
            assert model.get_inference_name() == f"{NAME}@{step}"
        after = [await rollout(model, step=step, temperature=0) for step in (0, 1, 2)]
        assert texts(after[0]) == pytest.approx(texts(before), abs=1e-4)
        assert texts(after[1]) != texts(after[2]) != texts(before)
        async with backend.exact_adapter_lease(model, 1):
            assert model.get_inference_name() == f"{NAME}@1"
            pinned = await rollout(model, temperature=0)
        assert texts(pinned) == pytest.approx(texts(after[1]), abs=1e-4)
        await model.delete_checkpoints()
        checkpoints = path / "p" / "models" / "run-1" / "checkpoints"
        assert [folder.name for folder in checkpoints.iterdir()] == ["0002"]


@pytest.fixture(scope="module")
def service_class():
    """ART's own service for dedicated GPUs, whose calls to a server are plain HTTP.

    It imports torch, transformers, trl and ART's training code, which needs CUDA; none of them has
    a part in these calls, so that they have stand-ins here.
    """
    absent = (
        "torch",
        "trl",
        "transformers",
        "art.local",
        "art.local.checkpoints",
        "art.preprocessing.pack",
        "art.preprocessing.tokenize",
        "art.unsloth.train",
        "art.utils.convert_moe_lora",
    )
    kept = {name: sys.modules.get(name) for name in absent}
    for name in absent:
        sys.modules[name] = stand_in(name)
    try:
        yield importlib.import_module("art.unsloth.service").UnslothService
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def stand_in(name):
    class Module(types.ModuleType):
        def __getattr__(self, attribute):
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return MagicMock(name=attribute)

    module = Module(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    return module


@pytest.fixture
def service(service_class, server, tmp_path):
    art_service = service_class(
        model_name=NAME,
        base_model="mlx-parallm-demo",
        config={"inference_gpu_ids": [0], "trainer_gpu_ids": [1]},
        output_dir=str(tmp_path),
    )
    url = httpx.URL(server.url)
    art_service._vllm_runtime.host, art_service._vllm_runtime.port = url.host, url.port
    art_service._serving_capabilities = ServingCapabilities.openai_compatible()
    yield art_service
    with contextlib.suppress(httpx.HTTPError):
        asyncio.run(art_service._wake_runtime())


def served(server):
    return {card["id"] for card in server.get("/v1/models").json()["data"]}


def test_step_mode(service, server):
    """Steps load under new names; pruning unloads the others; unknown ones are tolerated."""

    async def run():
        for step in (1, 2, 3):
            folder = write_peft_adapter(server.adapters / f"art-{step}", seed=step)
            await service.register_lora_for_step(step, str(folder))
        assert {f"{NAME}@{step}" for step in (1, 2, 3)} <= served(server)
        assert await service.acquire_exact_adapter(2, "") == f"{NAME}@2"
        await service.prune_loaded_adapters(retain_steps={3})
        assert f"{NAME}@3" in served(server)
        assert f"{NAME}@1" not in served(server)
        assert await service._unload_adapter_name(f"{NAME}@99") is False

    asyncio.run(run())


def test_shared_gpu(service, server):
    """Sleep for training, wake to serve, then load the step's adapter."""

    async def run():
        await service._sleep_runtime()
        assert server.get("/is_sleeping").json() == {"is_sleeping": True}
        folder = write_peft_adapter(server.adapters / "art-shared", seed=9)
        await service._wake_runtime()
        await service._reload_adapter(str(folder), 5)
        assert server.get("/is_sleeping").json() == {"is_sleeping": False}

    asyncio.run(run())
    body = {"model": f"{NAME}@5", "prompt": [1, 2, 3], "max_tokens": 2}
    assert server.ok("/v1/completions", body).json()["usage"]["completion_tokens"] == 2


def test_in_flight_mode(service, server):
    """ART's service replaces one adapter in its slot; ART's client demands the spans of each."""
    service.config["rollout_weight_update_mode"] = "in_flight_lora"
    model = art.TrainableModel(
        name=NAME, run_name="run-1", project="p", base_model="mlx-parallm-demo"
    )
    model.inference_base_url, model.inference_api_key = f"{server.url}/v1", "none"

    async def run():
        capabilities = await discover_serving_capabilities(
            base_url=server.url, headers=None, allow_openai_compatible=False
        )
        service._serving_capabilities = capabilities
        # ART's backend passes them to a model in this form.
        object.__setattr__(model, "_serving_capabilities", capabilities)
        assert model._policy_span_mode() == "require"
        model.inference_model_name = slot = service._in_flight_lora_slot
        for step in (0, 1, 2):
            folder = write_peft_adapter(server.adapters / f"in-flight-{step}", seed=step)
            await service.register_lora_for_step(step, str(folder))
            for more in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
                choice = await answered(model, slot, **more)
                for key in ("policy_token_spans", "prompt_policy_token_spans"):
                    (span,) = choice.model_extra[key]
                    assert span["generation_id"] == f"{NAME}@{step}"
                    assert (span["policy_version"], span["lora_slot"]) == (step, slot)
        exact = await service.acquire_exact_adapter(1, str(server.adapters / "in-flight-1"))
        assert {slot, exact} <= served(server)
        choice = await answered(model, exact)
        assert choice.model_extra["policy_token_spans"][0]["policy_version"] == 1
        await service.release_exact_adapter(1)
        # Somebody else's update came first.
        service._latest_step = 1
        with pytest.raises(httpx.HTTPStatusError, match="412"):
            await service._update_in_flight_adapter(str(folder), 3)

    asyncio.run(run())


async def answered(model, name, **more):
    """Return the choice of an answer through ART's client, which checks its spans."""
    answer = await model.openai_client().chat.completions.create(
        model=name, messages=[user(SUM)], logprobs=True, max_tokens=8, **more
    )
    if more:
        answer = await consume_chat_completion_stream(answer)
    check_choice(answer.choices[0])
    return answer.choices[0]


def test_runtime_is_found(server):
    """Check health, then the capabilities of ART's own protocol."""

    async def run():
        await wait_for_vllm_http_runtime(base_url=server.url, timeout=10)
        return await discover_serving_capabilities(
            base_url=server.url, headers=None, allow_openai_compatible=False
        )

    assert asyncio.run(run()).runtime == "art_vllm"
