"""Decode steps of a model over ranks beside one process, on random weights.

``python -m benchmarks.rank_decode --shape 8B --backend nccl`` on a machine with two NVIDIA GPUs;
``--shape tiny --backend ring`` runs on a CPU. For each number of ranks it starts them as
``mlx.launch`` would, and measures decode steps at each batch size, with ``--adapters`` and during
an update of one, and with ``--updates`` those of all weights. The greedy tokens of a few prompts
are compared with those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from benchmarks.checks import RESULTS
from benchmarks.make_model import train_tokenizer
from benchmarks.rank_processes import BACKENDS, run_ranks
from benchmarks.rank_updates import sharing, update_figures
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.bench.step_times import format_steps, summarise_steps
from mlx_parallm.bench.step_trace import TraceRecorder
from mlx_parallm.cli.ranks import with_ranks
from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.build import build_engines, follow_ranks, worker_for
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.types.events import TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.worker.device.ranks import join_ranks
from tests.builders.random_models import QWEN3, SHAPES

NAME = "bench"
#: ``SHAPE_32B``: Qwen3-32B.
SHAPE_32B: dict[str, Any] = QWEN3 | {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "tie_word_embeddings": False,
}
TINY_SHAPE: dict[str, Any] = QWEN3 | SHAPES["tiny"] | {"vocab_size": 4096}
ALL_SHAPES = {"8B": SHAPES["8B"], "0.6B": SHAPES["0.6B"], "32B": SHAPE_32B, "tiny": TINY_SHAPE}
# FILE_BYTES: size of a file of weights, which are made one file at a time.
FILE_BYTES = 4 << 30
# ROOM: tokens that a request may decode.
ROOM = 256
# NUM_ADAPTERS, ADAPTER_RANK: adapters that the rows of a batch share.
NUM_ADAPTERS, ADAPTER_RANK = 8, 16
# NUM_COMPARED, COMPARED_TOKENS: prompts whose greedy tokens are compared, and how many tokens.
NUM_COMPARED, COMPARED_TOKENS = 16, 64


def make_folder(folder: Path, shape: str) -> Path:
    """Write a random model, unless it is there."""
    config = ALL_SHAPES[shape] | {"architectures": ["Qwen3ForCausalLM"], "eos_token_id": 0}
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(0).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    if shape != "tiny":
        model.set_dtype(mx.bfloat16)
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    del model
    for number, names in enumerate(_files(weights)):
        path = folder / f"model-{number:05}.safetensors"
        mx.save_safetensors(str(path), {name: weights.pop(name) for name in names})
        mx.clear_cache()
    (folder / "done").touch()
    return folder


def _files(weights: dict[str, mx.array]) -> list[list[str]]:
    files: list[list[str]] = [[]]
    size = 0
    for name, array in weights.items():
        if files[-1] and size + array.nbytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += array.nbytes
    return files


def make_adapter(shape: str, seed: int) -> AdapterWeights:
    """Return a LoRA of all linear layers of the trunk."""
    config = ALL_SHAPES[shape]
    heads = config["num_attention_heads"] * config["head_dim"]
    groups = config["num_key_value_heads"] * config["head_dim"]
    size, inner = config["hidden_size"], config["intermediate_size"]
    layers = {
        "self_attn.q_proj": (heads, size),
        "self_attn.k_proj": (groups, size),
        "self_attn.v_proj": (groups, size),
        "self_attn.o_proj": (size, heads),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    draw = np.random.default_rng(seed)

    def factor(*dims: int) -> HostTensor:
        return HostTensor((draw.standard_normal(dims, np.float32) * 0.01).astype(np.float16))

    return AdapterWeights(
        modules={
            f"model.layers.{layer}.{name}": LowRank(
                kind="linear",
                a=factor(ADAPTER_RANK, inputs),
                b=factor(outputs, ADAPTER_RANK),
                scale=1.0,
            )
            for layer in range(config["num_hidden_layers"])
            for name, (outputs, inputs) in layers.items()
        }
    )


def settings_of(arguments: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings, with the ranks of this process."""
    longest = arguments.context + ROOM
    model = ModelConfig(path=str(arguments.folder), served_names=(NAME,), max_model_len=longest)
    config = EngineConfig(
        models=(model,),
        cache=CacheConfig(enable_prefix_caching=False, memory_fraction=0.9),
        scheduler=SchedulerConfig(max_num_seqs=max(arguments.batches), max_num_batched_tokens=4096),
        warm_up=False,
    )
    return with_ranks(config, ServerConfig(), os.environ)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of rank 0."""
    config, families, recorder = settings_of(arguments), MetricFamilies(), TraceRecorder()
    began = time.perf_counter()
    with worker_for(config, families) as worker:
        worker.tracer = recorder
        (built,) = build_engines(config, families, worker, ignore_progress, tracer=recorder)
        engine: Any = built.engine
        result: dict[str, Any] = {
            "ranks": config.ranks.size,
            "load s": time.perf_counter() - began,
            "path": engine.info.path,
            "attention": engine.info.attention_backend,
            "runs ahead": engine.info.runs_ahead,
            "compiled": engine.info.is_compiled,
            "peak GB": mx.get_peak_memory() / 1e9,
            "tokens": greedy_tokens(engine, arguments.context),
        }
        _show(result | {"tokens": None})
        for batch in arguments.batches:
            result[f"batch {batch}"] = decode(engine, batch, arguments, recorder)
            _show({f"batch {batch}": result[f"batch {batch}"]})
        if arguments.adapters:
            result["adapters"] = with_adapters(engine, arguments)
            _show({"adapters": result["adapters"]})
        if arguments.updates:
            rows = prompts_of(min(32, max(arguments.batches)), arguments.context)
            result["updates"] = update_figures(engine, arguments.folder, rows, arguments.warm_up)
            _show({"updates": result["updates"]})
    return result


def _show(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


def prompts_of(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts."""
    draw = random.Random(seed)
    return [[draw.randrange(1, 4000) for _ in range(length)] for _ in range(count)]


def greedy_tokens(engine: Any, context: int) -> list[list[int]]:
    """Return the greedy tokens of a few prompts, one request after the other."""
    tokens: list[list[int]] = []
    for place, prompt in enumerate(prompts_of(NUM_COMPARED, min(context, 64), seed=1)):
        engine.submit(
            GenerateRequest(
                request_id=f"greedy-{place}",
                model=NAME,
                prompt_ids=tuple(prompt),
                params=SamplingParams(max_tokens=COMPARED_TOKENS, temperature=0.0, ignore_eos=True),
            )
        )
        tokens.append([])
        while engine.has_work():
            for event in engine.step() or ():
                if isinstance(event, TokenEvent):
                    tokens[-1] += event.token_ids
    return tokens


def decode(
    engine: Any, batch: int, arguments: argparse.Namespace, recorder: TraceRecorder
) -> dict[str, Any]:
    """Return the times of decode steps."""
    load = DecodeLoad(engine, prompts_of(batch, arguments.context))
    began = time.perf_counter()
    load.prefill()
    prefill_s = time.perf_counter() - began
    load.decode(arguments.warm_up)
    times = load.decode(arguments.steps)
    load.end()
    while engine.has_work():
        engine.step()
    return {
        "ms": statistics.median(times),
        "p99 ms": sorted(times)[int(0.99 * (len(times) - 1))],
        "prefill s": prefill_s,
        "steps": format_steps(summarise_steps(recorder.spans, min(50, arguments.steps))),
    }


def with_adapters(engine: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return decode times of rows with adapters, and the cost of replacing one."""
    batch = min(32, max(arguments.batches))
    for number in range(NUM_ADAPTERS):
        weights = make_adapter(arguments.shape, number)
        engine.policies.load(AdapterUpload(name=f"a{number}", weights=weights))
    newer = make_adapter(arguments.shape, 99)
    base = DecodeLoad(engine, prompts_of(batch, arguments.context), name="base")
    base.prefill()
    base.decode(arguments.warm_up)
    base_ms = statistics.median(base.decode(arguments.steps))
    base.end()
    while engine.has_work():
        engine.step()
    for number, prompt in enumerate(prompts_of(batch, arguments.context)):
        engine.submit(
            GenerateRequest(
                request_id=f"adapted-{number}",
                model=NAME,
                prompt_ids=tuple(prompt),
                params=SamplingParams(max_tokens=ROOM, temperature=0.0, ignore_eos=True),
                adapter=f"a{number % NUM_ADAPTERS}",
            )
        )
    times: list[float] = []
    update_ms = 0.0
    lead = 60 + batch
    while engine.has_work() and len(times) < lead + 40:
        if len(times) == lead:
            began = time.perf_counter()
            engine.policies.load(AdapterUpload(name="a3", weights=newer, replaces=True))
            update_ms = 1e3 * (time.perf_counter() - began)
        began = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - began))
    adapted_ms = statistics.median(times[lead - 30 : lead])
    for number in range(batch):
        engine.abort(f"adapted-{number}")
    while engine.has_work():
        engine.step()
    return {
        "base ms": base_ms,
        "adapters ms": adapted_ms,
        "share of base tokens/s": base_ms / adapted_ms,
        "update ms": update_ms,
        "longest step after, in steps": max(times[lead : lead + 20]) / adapted_ms,
    }


def run_rank(arguments: argparse.Namespace) -> None:
    """Be one rank."""
    config = settings_of(arguments)
    shared: dict[str, Any] = {}
    if arguments.updates and config.ranks.size > 1:
        shared = {"sharing": sharing(arguments.folder, join_ranks(config.ranks.backend))}
    if config.ranks.rank:
        follow_ranks(config)
        return
    if shared:
        _show(shared)
    arguments.output.write_text(json.dumps(measure(arguments) | shared))


def launch(arguments: argparse.Namespace, size: int, extra: Sequence[str]) -> dict[str, Any]:
    """Run the ranks of one measurement, and return what rank 0 found."""
    output = RESULTS / f"ranks-{arguments.shape}-{size}.json"
    output.unlink(missing_ok=True)
    command = ["benchmarks.rank_decode", *extra, "--output", str(output)]
    run_ranks(command, size, arguments.backend)
    return json.loads(output.read_text()) if output.exists() else {}


def compare(results: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the share of greedy tokens that several ranks have in common with one process."""
    alone = results.get(1, {}).get("tokens")
    shares: dict[str, Any] = {}
    for size, result in results.items():
        if size == 1 or not alone or "tokens" not in result:
            continue
        pairs = [
            (ours, theirs)
            for own, other in zip(alone, result["tokens"], strict=True)
            for ours, theirs in zip(own, other, strict=True)
        ]
        shares[f"{size} ranks: equal greedy tokens"] = sum(a == b for a, b in pairs) / len(pairs)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="8B")
    parser.add_argument("--backend", choices=BACKENDS, default="nccl")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=12)
    parser.add_argument("--adapters", action="store_true", help="measure adapters too")
    parser.add_argument("--updates", action="store_true", help="measure updates of all weights")
    parser.add_argument("--folder", type=Path, help="of the model; made if it is not there")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output is not None:
        run_rank(arguments)
        return
    RESULTS.mkdir(exist_ok=True)
    folder = arguments.folder or RESULTS / f"rank-model-{arguments.shape}"
    began = time.perf_counter()
    make_folder(folder, arguments.shape)
    print(f"the model was made in {time.perf_counter() - began:.0f} s", flush=True)
    extra = ["--shape", arguments.shape, "--backend", arguments.backend, "--folder", str(folder)]
    extra += ["--context", str(arguments.context), "--steps", str(arguments.steps)]
    extra += ["--warm-up", str(arguments.warm_up), *["--adapters"] * arguments.adapters]
    extra += ["--updates"] * arguments.updates
    extra += ["--batches", *map(str, arguments.batches)]
    results = {size: launch(arguments, size, extra) for size in arguments.ranks}
    figures = {str(size): replace_tokens(result) for size, result in results.items()}
    _show(compare(results))
    output = RESULTS / f"ranks-{arguments.shape}.json"
    output.write_text(json.dumps({"figures": figures, **compare(results)}, indent=1))
    print(f"written to {output}")


def replace_tokens(result: dict[str, Any]) -> dict[str, Any]:
    """Return figures without the tokens, which are only compared."""
    return {name: value for name, value in result.items() if name != "tokens"}


if __name__ == "__main__":
    main()
