"""Prompts for the embedded model, and adapters for it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

SUM = "What is 17 + 25?"
NO_THINKING = {"enable_thinking": False}
WIDTH = 256
NUM_LAYERS = 6


def user(text: str) -> dict[str, str]:
    """Return a user's turn."""
    return {"role": "user", "content": text}


def prompt_ids(server, text: str = SUM, **more: object) -> list[int]:
    """Return the token ids of a conversation of one turn, by the server's own template."""
    body = {
        "messages": [user(text)],
        "add_generation_prompt": True,
        "chat_template_kwargs": NO_THINKING,
        **more,
    }
    return server.ok("/tokenize", {"model": server.model, **body}).json()["tokens"]


def write_peft_adapter(folder: Path, *, seed: int, rank: int = 8, scale: float = 0.1) -> Path:
    """Write a PEFT folder with random low-rank updates of each layer's queries and outputs."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "o_proj"],
        "bias": "none",
        "base_model_name_or_path": "mlx-parallm-demo",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        for module in ("q_proj", "o_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", (rank, WIDTH)), ("lora_B", (WIDTH, rank))):
                drawn = scale * random.standard_normal(shape)
                tensors[f"{name}.{part}.weight"] = drawn.astype(np.float32)
    (folder / "adapter_model.safetensors").write_bytes(safetensors(tensors))
    return folder


def safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    """Return a file: the length of a JSON header, the header, the numbers."""
    header: dict[str, object] = {}
    data = b""
    for name, tensor in tensors.items():
        begin = len(data)
        data += tensor.tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [begin, len(data)],
        }
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def reward_of_short_answers(completions: list, **_: object) -> list[float]:
    """Return rewards that differ between samples: the shorter, the better."""
    return [-float(len(completion[0]["content"])) for completion in completions]
