"""Tries every architecture of mlx_lm and writes docs/models.md.

``python -m benchmarks.architectures``

Each runs in a process of its own with tiny random float32 weights, through the same self-check that
decides how a served model runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_map

from benchmarks.architecture_configs import VOCAB_SIZE, config_of
from mlx_parallm.attention.reference import ReferenceAttention
from mlx_parallm.runner.cache_layout import probe_layout
from mlx_parallm.runner.path_choice import choose_path

# Modules that hold parts of models, or none that this project could serve.
PARTS = frozenset(
    {
        "activations",
        "base",
        "bitlinear_layers",
        "cache",
        "gated_delta",
        "mla",
        "pipeline",
        "rope_utils",
        "ssm",
        "switch_layers",
    }
)
BLOCK_SIZE = 4
TIMEOUT_S = 60
INTRO = """# Architectures

How each architecture of mlx_lm {version} runs, found by `python -m benchmarks.architectures` with
tiny random float32 weights on the CPU. The same check runs whenever a model is loaded, so this page
is a report, not a list that the code reads.

- **packed**: every token of a step is its own row of one forward, over the paged KV pool.
- **split**: the same forward, but the modules that use caches run by groups: all decoding rows
  together, each prefill chunk by itself. *(state)*: only recurrent and convolution modules do;
  *(rows)*: each sequence by itself in those modules.
- **sequential**: the whole model once per sequence, over the same pool, in the same batch.
- **alone**: mlx_lm's own caches, one sequence after the other.

The difference is the largest one of any log-probability against mlx_lm run alone on the same text,
ragged prompts prefilled in chunks beside decoding rows. The path before it, if any, was refused by
the check.

{summary}

| architecture | path | difference | refused before |
|---|---|---|---|
"""


def names() -> list[str]:
    """Every module of ``mlx_lm.models`` that may be a model."""
    found = (module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))
    return sorted(name for name in found if name not in PARTS)


def build(name: str) -> Any:
    """A tiny model with random weights, norms and biases included."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config_of(name)))

    def disturb(parameter: mx.array) -> mx.array:
        if not mx.issubdtype(parameter.dtype, mx.floating):
            return parameter
        return parameter.astype(mx.float32) + 0.05 * mx.random.normal(parameter.shape)

    model.update(tree_map(disturb, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def try_one(name: str) -> dict[str, Any]:
    """Path, difference and refusals of one architecture."""
    model = build(name)
    choice = choose_path(
        model,
        probe_layout(model),
        ReferenceAttention(BLOCK_SIZE),
        vocab_size=VOCAB_SIZE,
        num_blocks=128,
        block_size=BLOCK_SIZE,
        dtype="float32",
    )
    exact = [attempt for attempt in choice.attempts if attempt.exact]
    refused = [
        f"{attempt.path}: {attempt.error or f'differs by {attempt.difference:.1g}'}"
        for attempt in choice.attempts
        if not attempt.exact
    ]
    return {
        "path": exact[0].path if exact else "alone",
        "difference": exact[0].difference if exact else 0.0,
        "refused": refused,
    }


def run_one(name: str) -> dict[str, Any]:
    """``try_one`` in a process of its own; an ``error`` when it could not be tried."""
    command = [sys.executable, "-m", "benchmarks.architectures", "--one", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {TIMEOUT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    return {"error": ((done.stderr or done.stdout).strip().splitlines() or ["failed"])[-1]}


def page(results: dict[str, dict[str, Any]]) -> str:
    """docs/models.md."""
    tried = {name: result for name, result in results.items() if "error" not in result}
    batched = sum(result["path"] != "alone" for result in tried.values())
    counts: dict[str, int] = {}
    for result in tried.values():
        family = result["path"].split()[0]
        counts[family] = counts.get(family, 0) + 1
    parts = ", ".join(f"{count} {family}" for family, count in sorted(counts.items()))
    summary = (
        f"{batched} of {len(tried)} architectures tried run in one continuous batch and agree with "
        f"mlx_lm ({parts})."
    )
    text = INTRO.format(version=mlx_lm.__version__, summary=summary)
    for name, result in tried.items():
        refused = "; ".join(reason[:90] for reason in result["refused"]).replace("|", "/")
        difference = "—" if result["path"] == "alone" else f"{result['difference']:.0e}"
        text += f"| {name} | {result['path']} | {difference} | {refused} |\n"
    text += "\nNot tried:\n\n"
    for name, result in results.items():
        if "error" in result:
            text += f"- {name}: {result['error'][:160]}\n"
    return text


def main() -> None:
    """Try one architecture, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help="try this one and print JSON")
    parser.add_argument("--output", type=Path, default=Path("docs/models.md"))
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(try_one(options.one)))
        return
    results = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, result in zip(names(), pool.map(run_one, names()), strict=True):
            results[name] = result
            print(name, result, flush=True)
    options.output.write_text(page(results))


if __name__ == "__main__":
    main()
