"""The sequences of calls of prime-rl, slime and SkyRL, replayed as plain HTTP."""

from __future__ import annotations

import math
import shutil
import threading
from pathlib import Path

import pytest
from exercises import SUM, prompt_ids, write_peft_adapter
from safetensors.numpy import load_file, save_file

WEIGHTS = "model.safetensors"
SENTINEL = -9999.0


@pytest.fixture(scope="module")
def new_weights(server):
    """Return a checkpoint folder as trainers write it, with other weights."""
    folder = server.adapters / "step-7"
    shutil.copytree(server.folder, folder, dirs_exist_ok=True)
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.25
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


@pytest.fixture
def _restored(server):
    """Put back the weights that the server started with."""
    yield
    server.post("/resume")
    server.ok("/update_weights_from_disk", {"model_path": str(restored(server))})


def restored(server) -> Path:
    folder = server.adapters / "step-0"
    shutil.copytree(server.folder, folder, dirs_exist_ok=True)
    return folder


def completion(server, **more):
    body = {"prompt": prompt_ids(server), "max_tokens": 6, "temperature": 0.0, "logprobs": 0}
    body |= {"return_token_ids": True, **more}
    (choice,) = server.ok("/v1/completions", {"model": server.model, **body}).json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.mark.usefixtures("_restored")
class TestPrimeRl:
    def test_ready(self, server):
        assert server.get("/health").status_code == 200
        (card,) = [
            model for model in server.get("/v1/models").json()["data"] if not model["parent"]
        ]
        assert card["id"] == server.model

    def test_weights_by_filesystem(self, server, new_weights):
        before = completion(server)
        server.ok("/pause", params={"mode": "keep", "clear_cache": "false"})
        server.ok("/update_weights", {"weight_dir": str(new_weights)})
        server.ok("/resume")
        after = completion(server)
        assert after[1] != before[1]
        # No cached KV of the old weights is used: a salt changes nothing.
        assert completion(server, cache_salt="step-7") == after

    def test_adapter_of_one_name_at_new_paths(self, server):
        seen = []
        for step in (1, 2):
            folder = write_peft_adapter(server.adapters / f"prime-{step}", seed=step)
            server.ok("/load_lora_adapter", {"lora_name": "policy", "lora_path": str(folder)})
            seen.append(completion(server, model="policy", cache_salt=str(step))[1])
        assert seen[0] != seen[1]

    def test_prefill_scorer(self, server):
        ids = prompt_ids(server)
        body = {
            "model": server.model,
            "token_ids": ids,
            "sampling_params": {"prompt_logprobs": 1, "max_tokens": 1},
        }
        answer = server.ok("/inference/v1/generate", body).json()
        scores = answer["prompt_logprobs"]
        assert scores[0] is None
        for token, entry in zip(ids[1:], scores[1:], strict=True):
            assert math.isfinite(entry[str(token)]["logprob"])


@pytest.mark.usefixtures("_restored")
class TestSlime:
    def generate(self, server, **more):
        body = {
            "input_ids": prompt_ids(server),
            "sampling_params": {"max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
            "return_logprob": True,
        }
        return server.ok("/generate", body | more).json()

    def test_rollout(self, server):
        assert server.get("/health_generate").status_code == 200
        assert server.ok("/workers", {"url": server.url, "worker_type": "regular"})
        assert [worker["url"] for worker in server.get("/workers").json()["workers"]] == [
            server.url
        ]
        answer = self.generate(server)
        meta = answer["meta_info"]
        triples = meta["output_token_logprobs"]
        assert [triple[1] for triple in triples] == answer["output_ids"]
        assert all(math.isfinite(triple[0]) and triple[0] != SENTINEL for triple in triples)
        assert meta["finish_reason"]["type"] in ("stop", "length")
        assert meta["weight_version"]

    def test_aborted_rollout_keeps_its_tokens(self, server):
        """Roll out in parts: abort all until the load is zero, and continue the partial samples."""
        answers = []
        long = {"max_new_tokens": 4000, "temperature": 1.0, "ignore_eos": True}
        threads = [
            threading.Thread(
                target=lambda: answers.append(self.generate(server, sampling_params=long))
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        while num_requests(server) < 3:
            pass
        server.ok("/abort_request", {"abort_all": True})
        while num_requests(server):
            server.ok("/abort_request", {"abort_all": True})
        for thread in threads:
            thread.join(60)
        assert len(answers) == 3
        for answer in answers:
            meta = answer["meta_info"]
            assert meta["finish_reason"]["type"] == "abort"
            assert len(meta["output_token_logprobs"]) == len(answer["output_ids"])
        partial = answers[0]["output_ids"]
        resumed = self.generate(server, input_ids=prompt_ids(server) + partial)
        assert resumed["meta_info"]["prompt_tokens"] == len(prompt_ids(server)) + len(partial)

    def test_update_from_disk(self, server, new_weights):
        before = completion(server)
        server.ok("/pause_generation", {})
        assert server.get("/flush_cache").status_code == 200
        body = {"model_path": str(new_weights), "weight_version": "7"}
        assert server.ok("/update_weights_from_disk", body).json()["success"] is True
        server.ok("/continue_generation", {})
        assert completion(server)[1] != before[1]
        assert self.generate(server)["meta_info"]["weight_version"] == "7"
        assert server.get("/get_weight_version").json()["weight_version"] == "7"

    def test_memory_is_lent_to_training(self, server):
        before = completion(server)
        server.ok("/release_memory_occupation", {})
        server.ok("/resume_memory_occupation", {})
        assert completion(server)[0] == before[0]

    def test_tensors_by_cuda_are_refused(self, server):
        for path in ("/update_weights_from_distributed", "/init_weights_update_group"):
            answer = server.post(path, {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]})
            assert answer.status_code == 501, path
            assert "disk" in answer.text or "safetensors" in answer.text


class TestSkyRl:
    def test_external_inference(self, server):
        """Sample as the Tinker server does, which names an adapter without loading it before."""
        write_peft_adapter(server.adapters / "model-1_ckpt-3", seed=5)
        body = {
            "model": "model-1_ckpt-3",
            "prompt": prompt_ids(server, SUM),
            "n": 2,
            "seed": 7,
            "max_tokens": 6,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "logprobs": True,
            "stream": False,
            "return_token_ids": True,
            "prompt_logprobs": 0,
        }
        headers = {"X-Session-ID": "session-1", "Authorization": "Bearer EMPTY"}
        answer = server.ok("/v1/completions", body, headers=headers).json()
        assert len(answer["choices"]) == 2
        for choice in answer["choices"]:
            assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
            assert choice["prompt_logprobs"][0] is None
            assert len(choice["prompt_logprobs"]) == len(body["prompt"])
            assert choice["finish_reason"] in ("stop", "length")

    def test_remote_inference_control(self, server):
        server.ok("/pause", params={"mode": "keep", "clear_cache": "false"})
        server.ok("/resume")
        server.ok("/reset_prefix_cache", {"reset_running_requests": False})
        assert server.get("/get_world_size").json()["world_size"] == server.num_ranks
        server.ok("/sleep", params={"level": 1})
        assert server.get("/is_sleeping").json() == {"is_sleeping": True}
        server.ok("/wake_up", params={"tags": ["weights"]})
        server.ok("/wake_up", params={"tags": ["kv_cache"]})
        assert completion(server)[0]


def num_requests(server) -> int:
    answer = server.get("/v1/loads", params={"include": "core"})
    assert answer.status_code == 200
    return sum(
        load["num_running_reqs"] + load["num_waiting_reqs"] for load in answer.json()["loads"]
    )
