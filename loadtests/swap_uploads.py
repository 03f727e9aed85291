"""Adapters of the embedded model as uploads: good ones, and those that must change nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np

from mlx_parallm.client.tensors import encode_safetensors
from mlx_parallm.demo_models.folders import DEMO_FOLDER

ROUTE = "/v1/update_adapter_weights"
RANK, SCALE = 8, 2.0
CONFIG: Mapping[str, Any] = {
    "fine_tune_type": "lora",
    "lora_parameters": {"rank": RANK, "scale": SCALE, "dropout": 0.0},
}
# DEVIATION: large enough that versions give different answers.
DEVIATION = 0.1
TRUNCATED, NAN, SHAPE, KILLED = "truncated", "NaN", "wrong shape", "client killed"
BAD_KINDS = (TRUNCATED, NAN, SHAPE, KILLED)
# SENDER: a program that sends its input, reports that, and waits to be killed.
SENDER = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(sys.stdin.buffer.read())
print("sent", flush=True)
connection.recv(1)
"""


def tensors(seed: int) -> dict[str, np.ndarray]:
    """Return a LoRA of queries and values of all layers, named as mlx_lm names it."""
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    dims, head_dim = config["hidden_size"], config["head_dim"]
    widths = {
        "q_proj": config["num_attention_heads"] * head_dim,
        "v_proj": config["num_key_value_heads"] * head_dim,
    }
    source = np.random.default_rng(seed)
    made = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            path = f"model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_a", (dims, RANK)), ("lora_b", (RANK, width))):
                made[f"{path}.{part}"] = source.normal(0, DEVIATION, shape).astype(np.float32)
    return made


def good_body(seed: int) -> bytes:
    """Return a complete file."""
    return encode_safetensors(tensors(seed))


def bad_body(kind: str, seed: int) -> bytes:
    """Return a broken file; for a killed client, the first half of a file."""
    if kind in (TRUNCATED, KILLED):
        body = good_body(seed)
        return body[: len(body) // 2]
    made = tensors(seed)
    name = next(iter(made))
    if kind == NAN:
        made[name][0, 0] = np.nan
    else:
        made[name] = np.zeros((made[name].shape[0] + 1, RANK), np.float32)
    return encode_safetensors(made)


def query(name: str, version: str) -> dict[str, str]:
    """Return the fields beside the file."""
    return {"name": name, "version": version, "config": json.dumps(CONFIG)}


def upload_and_die(base_url: str, fields: Mapping[str, str], half: bytes) -> None:
    """Kill a client that has sent half of its upload."""
    address = urlsplit(base_url)
    head = (
        f"POST {ROUTE}?{urlencode(fields)} HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/octet-stream\r\ncontent-length: {2 * len(half)}\r\n\r\n"
    )
    command = [sys.executable, "-c", SENDER, str(address.hostname), str(address.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(head.encode() + half)
        client.stdin.close()
        client.stdout.readline()
        client.kill()
