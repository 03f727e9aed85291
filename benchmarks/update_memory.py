"""Measure how much memory each form of a weight update takes beside what the server has (Linux).

``python -m benchmarks.update_memory`` makes a model of 280 MB in float32, and sends it to its own
server in every form. A figure is the peak of resident memory during an update, less what was
resident before, divided by the bytes of the weights; the largest of the repetitions counts.
``--dtype bfloat16`` makes the checkpoint half as large, which the server casts to float32.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx2
import mlx.core as mx
import psutil

from benchmarks.checks import Check, conclude
from benchmarks.make_model import CONFIG, make_model
from benchmarks.servers import Server, mlx_parallm_server

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "intermediate_size": 2560,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
RAW = {"content-type": "application/octet-stream"}
# HIGH_WATER: what to write to /proc/PID/clear_refs so that VmHWM begins anew.
HIGH_WATER = "5"
FLOAT_BYTES = 4
# RANK: of the adapter, whose folder is beside the model's.
RANK = 256
ADAPTER = "adapter"
# ROOM: what reading a folder takes beside tensors: Python objects, and pages of the file.
ROOM = 16 << 20


def processes(server: Server) -> list[int]:
    """Return the ids of a server's processes."""
    first = psutil.Process(server.process.pid)
    return [first.pid, *(child.pid for child in first.children(recursive=True))]


def status_bytes(pid: int, field: str) -> int:
    """Return a size of /proc/PID/status in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class Taken(NamedTuple):
    """Resident bytes of all processes of a server beside those before an update.

    Attributes:
        peak: at the peaks of the processes.
        left: after the answer.
    """

    peak: int
    left: int


def measured(server: Server, update: Callable[[], httpx2.Response]) -> Taken:
    """Return what an update takes."""
    pids = processes(server)
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text(HIGH_WATER)
    before = sum(status_bytes(pid, "VmRSS") for pid in pids)
    update().raise_for_status()
    peak, after = (sum(status_bytes(pid, name) for pid in pids) for name in ("VmHWM", "VmRSS"))
    return Taken(peak - before, after - before)


def make_adapter(folder: Path) -> Path:
    """Write an adapter of PEFT for the model; return its folder."""
    folder.mkdir()
    wide, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    shapes = {"gate_proj": (wide, inner), "up_proj": (wide, inner), "down_proj": (inner, wide)}
    tensors: dict[str, mx.array] = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.mlp.{name}"
            tensors[f"{path}.lora_A.weight"] = mx.random.normal((RANK, inputs)) * 0.01
            tensors[f"{path}.lora_B.weight"] = mx.random.normal((outputs, RANK)) * 0.01
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(shapes)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def forms(client: httpx2.Client, folder: Path) -> dict[str, Callable[[], httpx2.Response]]:
    """Return what sends an update in each form, by the names in docs/memory.md."""
    file, adapter = folder / "model.safetensors", folder.parent / ADAPTER

    def encoded() -> str:
        return base64.b64encode(file.read_bytes()).decode()

    def tensors() -> dict[str, Any]:
        return {"serialized_named_tensors": [encoded()], "load_format": "safetensors"}

    def wake_up() -> httpx2.Response:
        client.post("/sleep?level=2").raise_for_status()
        return client.post("/wake_up")

    post = client.post
    return {
        "file as body": lambda: post("/update_weights", content=file.read_bytes(), headers=RAW),
        "file in a form": lambda: post("/update_weights", files={"weights": file.open("rb")}),
        "file in JSON": lambda: post("/update_weights", json={"tensors": encoded()}),
        "SGLang's tensors": lambda: post("/update_weights_from_tensor", json=tensors()),
        "folder": lambda: post("/update_weights_from_disk", json={"model_path": str(folder)}),
        "sleep and wake-up": wake_up,
        "adapter as body": lambda: post(
            "/v1/update_adapter_weights",
            content=(adapter / "adapter_model.safetensors").read_bytes(),
            params={"name": "a", "config": (adapter / "adapter_config.json").read_text()},
            headers=RAW,
        ),
        "adapter's folder": lambda: post(
            "/load_lora_adapter", json={"lora_name": "a", "lora_path": str(adapter)}
        ),
    }


def largest_bytes(folder: Path) -> int:
    """Return the size of the largest tensor of a model in float32, in bytes."""
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    return max(array.size for array in loaded.values()) * FLOAT_BYTES


def weight_bytes(folder: Path) -> int:
    """Return the size of all tensors of a model in float32, in bytes."""
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    return sum(array.size for array in loaded.values()) * FLOAT_BYTES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", help="of the checkpoint")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--forms", nargs="*", help="which to measure (default: all)")
    parser.add_argument("--data-parallel-size", type=int, default=1, dest="engines")
    args = parser.parse_args()
    with TemporaryDirectory() as root:
        folder = make_model(Path(root) / "m", 0, {**CONFIG, **SHAPE, "torch_dtype": args.dtype})
        adapter = make_adapter(Path(root) / ADAPTER) / "adapter_model.safetensors"
        weights, largest = weight_bytes(folder), largest_bytes(folder)
        options = ["--kv-cache-memory-bytes", "64MiB", "--allowed-adapter-roots", root]
        options += ["--max-lora-rank", str(RANK), "--max-loras", "2"]
        options += ["--dtype", "float32", "--data-parallel-size", str(args.engines)]
        taken: dict[str, list[Taken]] = {}
        for name in args.forms or forms(httpx2.Client(), folder):
            # What an earlier form has left would hide what a later one takes.
            with (
                mlx_parallm_server(folder, options) as server,
                httpx2.Client(base_url=server.base_url, timeout=None) as client,
            ):
                update = forms(client, folder)[name]
                taken[name] = [measured(server, update) for _ in range(args.repetitions)]
                print(
                    name, [[f"{each / weights:.2f}" for each in update] for update in taken[name]]
                )
        sizes = {name: adapter.stat().st_size for name in taken if name.startswith(ADAPTER)}
    peaks = {name: max(each).peak / sizes.get(name, weights) for name, each in taken.items()}
    checks = [Check(f"{name}: times its bytes", ratio) for name, ratio in peaks.items()]
    limit = args.engines * (weights + largest + ROOM) / weights
    if "folder" in peaks:
        checks.append(Check("folder, beside weights and a tensor", peaks["folder"], "<=", limit))
    return conclude("update_memory", checks, {"taken": taken, "weights": weights})


if __name__ == "__main__":
    sys.exit(main())
