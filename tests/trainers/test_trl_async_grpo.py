"""TRL's ``AsyncGRPOTrainer``: its client's calls, its rollout loop, and whole training by LoRA."""

from __future__ import annotations

import json
import threading
import types

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from exercises import prompt_ids, reward_of_short_answers, user
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)
from trl.experimental.async_grpo.async_grpo_trainer import save_lora_adapter, select_adapter_sync
from trl.experimental.async_grpo.vllm_client import VLLMClient

STALENESS = 2
LORA = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.fixture(scope="module", autouse=True)
def _accelerate():
    PartialState(cpu=True)


@pytest.fixture
def client(server):
    return VLLMClient(server.url, server_timeout=10)


@pytest.fixture
def policy(server):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(server.folder, dtype=torch.float32)
    policy = get_peft_model(model, LORA)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    return policy


def rollout(server, model, ids, **more):
    """Send the rollout worker's request."""
    body = {
        "model": model,
        "prompt": ids,
        "max_tokens": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "n": 1,
        "return_token_ids": True,
        "logprobs": 0,
        "seed": 2**62 + 12345,
        **more,
    }
    choice = server.ok("/v1/completions", body).json()["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
    return choice


def trained_logprobs(policy, prompt, completion):
    """Return the trainer's log-probabilities: one forward of the whole sequence in torch."""
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        logits = policy(input_ids=ids).logits[0].log_softmax(-1)
    places = range(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return [logits[at, token].item() for at, token in zip(places, completion, strict=True)]


def test_server_is_fit_for_adapters(client, server, policy):
    client.wait_for_server_ready(poll_interval_s=0.1)
    info = client.get_server_info()
    args = types.SimpleNamespace(max_staleness=STALENESS)
    assert select_adapter_sync(info, policy, args) is True
    assert client.get_dtype() == "torch.float32"
    assert client.get_world_size() == server.num_ranks
    assert client.get_max_model_len() == server.get("/v1/models").json()["data"][0]["max_model_len"]


def test_too_few_slots_are_told(client, policy):
    """``max_loras`` is the server's real number: one more version than slots is refused by TRL."""
    info = client.get_server_info()
    slots = info["lora_config"]["max_loras"]
    with pytest.raises(ValueError, match="--max-loras"):
        select_adapter_sync(info, policy, types.SimpleNamespace(max_staleness=slots - 1))
    args = types.SimpleNamespace(max_staleness=slots - 2)
    assert select_adapter_sync(info, policy, args) is True


def test_sequence_of_versions(client, server, policy):
    """Pause, publish, resume, sample and unload more versions than stay loaded."""
    accelerator = types.SimpleNamespace(
        is_main_process=True, device=torch.device("cpu"), wait_for_everyone=lambda: None
    )
    prompt = prompt_ids(server)
    for version in range(1, STALENESS + 4):
        folder = server.adapters / f"trl-policy-v{version}"
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                if "lora_B" in name:
                    weight.add_(0.01 * version)
        client.pause()
        assert server.get("/is_paused").json() == {"is_paused": True}
        save_lora_adapter(policy, accelerator, "default", str(folder))
        client.load_lora_adapter(f"trl-policy-v{version}", str(folder))
        client.resume()
        stale = version - (STALENESS + 1)
        if stale > 0:
            client.unload_lora_adapter(f"trl-policy-v{stale}")
        choice = rollout(server, f"trl-policy-v{version}", prompt, temperature=1.0)
        expected = trained_logprobs(policy, prompt, choice["token_ids"])
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=2e-4)
    served = {card["id"] for card in server.get("/v1/models").json()["data"]}
    assert {f"trl-policy-v{n}" for n in range(3, STALENESS + 4)} <= served
    assert "trl-policy-v1" not in served
    client.unload_lora_adapter("trl-policy-v1")


def test_rollouts_wait_while_paused(client, server):
    """Check that in keep mode a request sent during a pause is answered after it."""
    client.pause()
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(rollout(server, server.model, prompt_ids_of[0]))
    )
    prompt_ids_of = [prompt_ids(server)]
    thread.start()
    thread.join(0.5)
    assert not answers
    client.resume()
    thread.join(60)
    assert len(answers) == 1


def test_adapter_that_is_not_loaded(server):
    body = {"model": "trl-policy-v99", "prompt": [1, 2], "max_tokens": 1}
    assert server.post("/v1/completions", body).status_code == 404


def test_nccl_is_refused(client):
    """Check the refusal of a full-weight sync, which needs CUDA on both sides."""
    with pytest.raises(Exception, match=r"501.*"):
        client.init_weight_transfer_engine({"master_address": "127.0.0.1", "master_port": 1})


def varlen_attention(query, key, value, starts_q, starts_k, longest_q, longest_k, **options):
    """Return flash-attn's varlen function for a CPU: causal, aligned to the end of each path."""
    del longest_q, longest_k
    out = torch.empty_like(query)
    groups = query.shape[1] // key.shape[1]
    for segment in range(len(starts_q) - 1):
        rows = slice(starts_q[segment], starts_q[segment + 1])
        path = slice(starts_k[segment], starts_k[segment + 1])
        num_rows, num_keys = rows.stop - rows.start, path.stop - path.start
        scores = torch.einsum(
            "qhd,khd->hqk", query[rows], key[path].repeat_interleave(groups, dim=1)
        )
        scores = scores * options["softmax_scale"]
        seen = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[rows] = torch.einsum(
            "hqk,khd->qhd", weights, value[path].repeat_interleave(groups, dim=1)
        )
    return out


def test_training(server, monkeypatch):
    """Run the whole trainer and its worker process.

    Two functions that need CUDA have stand-ins: flash-attn 3, and the lookup of the GPU's speed.
    """
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    kernels = types.SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernels)
    tokenizer = AutoTokenizer.from_pretrained(server.folder)
    # TRL recognises chat templates by their text; this model writes as Qwen3 does.
    tokenizer.response_template = qwen3_template
    # The model never saw these words, so its answers differ.
    dataset = Dataset.from_list([{"prompt": [user("zebra purple")]}, {"prompt": [user("?!")]}] * 8)
    # The server reads adapters below this folder only.
    output = server.adapters / "run"
    trainer = AsyncGRPOTrainer(
        model=str(server.folder),
        reward_funcs=reward_of_short_answers,
        args=AsyncGRPOConfig(
            output_dir=str(output),
            vllm_server_base_url=server.url,
            per_device_train_batch_size=4,
            token_budget=-1,
            num_generations=4,
            max_completion_length=24,
            temperature=1.2,
            max_steps=3,
            max_staleness=STALENESS,
            weight_sync_steps=1,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
        ),
        processing_class=tokenizer,
        train_dataset=dataset,
        peft_config=LORA,
    )
    assert trainer._lora_sync
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.model_version >= 3
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps(steps, indent=1))
    assert len(steps) == 3
    assert any(float(step["grad_norm"]) > 0 for step in steps)
    # For tokens of the trained version, torch computes the server's log-probabilities.
    fresh = [step for step in steps if float(step["sample/staleness_max"]) == 0]
    assert fresh
    assert all(float(step["ratio"]) == pytest.approx(1, abs=1e-3) for step in fresh)
    assert all(abs(float(step["kl"])) < 1e-5 for step in fresh)
    served = {card["id"] for card in server.get("/v1/models").json()["data"]}
    assert f"trl-policy-v{trainer.model_version}" in served
    assert server.get("/is_paused").json() == {"is_paused": False}
