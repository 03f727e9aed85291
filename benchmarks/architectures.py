"""Tries every architecture of mlx_lm and of this package, and writes docs/models.md.

``python -m benchmarks.architectures``; ``--ranks 2`` tries those that several processes can compute
together, and writes that section alone; ``--states`` writes the one on states alone.

Each runs in a process of its own with tiny random float32 weights, through the same self-check that
decides how a served model runs.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx_lm
import mlx_lm.models

from benchmarks import states
from benchmarks.architectures_over_ranks import (
    section,
    section_of,
    shardable,
    try_over_ranks,
    with_section,
)
from mlx_parallm.models.checkpoints.known_differences import DIFFERENCES
from mlx_parallm.models.decoder_classes import OWN_DECODERS
from mlx_parallm.peers import child_process
from tests.builders.architectures.trial import try_one

# PARTS: modules that hold parts of models, or models that this project cannot serve.
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
TIMEOUT_S = 240
#: ``ENCODER_DECODERS``: the heading of a section that is written by hand.
ENCODER_DECODERS = "## Encoder-decoders\n"
# LONG_TOLERANCE: largest difference of a long text that rounding explains.
LONG_TOLERANCE = 1e-3
# REASONS: causes of errors of architectures that could not be tried.
REASONS = {
    "No Metal back-end": "needs a Metal kernel, which this machine cannot run",
    "pip install ai2-olmo": "needs the package ai2-olmo; with it mlx_lm's own forward of a prompt "
    'adds the mask "causal" to an array, which raises ValueError',
}
INTRO = """# Architectures

This page shows how each architecture of mlx_lm {version} runs, and {own}, which mlx_lm lacks.
`python -m benchmarks.architectures` found it with tiny random float32 weights on the CPU.
The same check runs whenever a model is loaded, so this page is a report, not a list that the code
reads.

A model runs on one of these paths:

- **packed**: every token of a step is its own row of one forward, over the paged KV pool.
- **split**: the same forward, but the modules that use caches run by groups.
  All decoding rows are one group, and each prefill chunk is its own.
  - *(state)*: only recurrent and convolution modules run by groups.
  - *(rows)*: these modules run each sequence separately.
- **sequential**: the whole model runs once per sequence, over the same pool, in the same batch.
- **alone**: the model runs with mlx_lm's own caches, one sequence after the other.

The difference is the largest difference of any log-probability from mlx_lm alone on the same text;
for {own}, it is from the model of this package alone, whose logits are those of transformers.
The texts are ragged prompts that are prefilled in chunks beside decoding rows.
The last column has the paths that the check refused before.

{summary}

| architecture | path | difference | refused before |
|---|---|---|---|
"""

SAVED = """
## Folders of transformers

Folders that transformers 5.23 saves compute what transformers computes.
`tests/integration/test_families.py` compares tiny models of every family that both have.
Both generations of `config.json` are read, and transformers' defaults count.
Where neither `config.json` nor the files untie the LM head, it is tied, and a warning says so.

If a folder has `model.safetensors.index.json`, each weight is read from the file that it names.
Without an index `model.safetensors` is read, and without both all `model*.safetensors`.
Updates of weights, encoders, draft models and ranks read the same files.

`--hf-overrides '{"rope_theta": 1000000}'` changes fields before anything reads them.
The digest of the model's files covers them.
Fields of `text_config` and `vision_config` that it does not name stay; other objects are replaced.
Sizes on which shapes depend, and classes that are not known, are refused.

These fields have an effect here, although mlx_lm's classes lack them:

- `sliding_window` of gemma2, mistral, ministral3, mixtral, phi3, phimoe and starcoder2;
- `attention_factor` of YaRN, and `truncate` in gpt_oss;
- `partial_rotary_factor` of glm.

These models are refused, because mlx_lm has no class for them:

- llama4_text with a mixture of experts;
- minimax, which is MiniMax-Text-01 (MiniMax M2 is served);
- olmo, the first OLMo;
- bitnet with weights that are not packed.

mlx_lm computes these fields otherwise than transformers.
A warning at load names the field if a model is concerned:

| architecture | field | with mlx_lm |
|---|---|---|
"""


def names() -> list[str]:
    """Return every module of ``mlx_lm.models`` that may be a model, and this package's own."""
    modules = (module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))
    return sorted({name for name in modules if name not in PARTS} | OWN_DECODERS.keys())


def run_one(name: str) -> dict[str, Any]:
    """Return ``try_one``'s result from a process of its own, with ``error`` if it failed."""
    target = ["benchmarks.architectures", "--one", name]
    try:
        done = child_process.run(
            target, timeout_s=TIMEOUT_S, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {TIMEOUT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    if done.returncode < 0:
        return {"error": f"ends the process with {signal.Signals(-done.returncode).name}"}
    last = ((done.stderr or done.stdout).strip().splitlines() or ["failed"])[-1]
    return {"error": _known(last)}


def _known(error: str) -> str:
    """Return the cause of an error, if it is a known one."""
    return next((why for part, why in REASONS.items() if part in error), error)


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the content of docs/models.md."""
    tried = {name: result for name, result in results.items() if "error" not in result}
    own = ", ".join(OWN_DECODERS)
    text = INTRO.format(version=mlx_lm.__version__, own=own, summary=_summary(tried))
    for name, result in tried.items():
        refused = "; ".join(reason[:90] for reason in result["refused"]).replace("|", "/")
        difference = "—" if result["path"] == "alone" else f"{result['difference']:.0e}"
        text += f"| {name} | {result['path']} | {difference} | {refused} |\n"
    text += _list("Alone, because:", {n: r["note"] for n, r in tried.items() if "note" in r})
    text += _list("Not tried:", {n: r["error"] for n, r in results.items() if "error" in r})
    return text + _long_texts(tried) + differences()


def differences() -> str:
    """Return the section on models that transformers saves."""
    rows = [
        f"| {name} | `{field}` | {how} |\n"
        for name, known in DIFFERENCES.items()
        for field, how, _ in known
    ]
    return SAVED + "".join(rows)


def _summary(tried: dict[str, dict[str, Any]]) -> str:
    batched = sum(result["path"] != "alone" for result in tried.values())
    counts: dict[str, int] = {}
    for result in tried.values():
        family = result["path"].split()[0]
        counts[family] = counts.get(family, 0) + 1
    parts = ", ".join(f"{count} {family}" for family, count in sorted(counts.items()))
    return (
        f"{batched} of {len(tried)} architectures tried run in one continuous batch and agree with "
        f"the model alone ({parts})."
    )


def _long_texts(tried: dict[str, dict[str, Any]]) -> str:
    """Return the section on texts longer than those of the check at load."""
    wrong = {
        name: f"{long['path']} is accepted and "
        + (f"fails: {long['error']}" if "error" in long else f"differs by {long['difference']:.1g}")
        for name, result in tried.items()
        if (long := result.get("long")) and not long.get("difference", 1.0) <= LONG_TOLERANCE
    }
    return _list(
        "The check at load has short texts; it exceeds only windows up to 512 tokens.\n"
        "With windows, chunks and sparse selection from 600 tokens on, these were accepted on a "
        "path that differs from mlx_lm on texts of up to 700 tokens:",
        wrong,
    )


def _list(title: str, entries: dict[str, str]) -> str:
    lines = "".join(f"- {name}: {text[:160]}\n" for name, text in entries.items())
    return f"\n{title}\n\n" + (lines or "- none\n")


def main() -> None:
    """Try one architecture, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help="try this one and print JSON")
    parser.add_argument("--output", type=Path, default=Path("docs/models.md"))
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--ranks", type=int, help="try architectures over so many ranks instead")
    parser.add_argument("--states", action="store_true", help="write the section on states alone")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(try_one(options.one)))
        return
    old = options.output.read_text() if options.output.exists() else ""
    if options.ranks:
        options.output.write_text(with_section(old, _over_ranks(options.ranks)))
        return
    states_section = states.section(names())
    if options.states:
        options.output.write_text(states.with_section(old, states_section))
        return
    results = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, result in zip(names(), pool.map(run_one, names()), strict=True):
            results[name] = result
            print(name, result, flush=True)
    written = states.with_section(page(results), states_section)
    written = f"{written.rstrip()}\n\n{own_section(old)}"
    options.output.write_text(with_section(written, section_of(old)))


def own_section(page: str) -> str:
    """Return a page's section on encoder-decoders, which is written by hand; "" if it has none."""
    _, heading, rest = page.partition(ENCODER_DECODERS)
    return heading + rest.partition("\n## ")[0]


def _over_ranks(size: int) -> str:
    """Return the section on what ranks of this number can compute together."""
    results = {}
    for name in shardable(names()):
        result = try_over_ranks(name, size)
        if "error" in result:
            result["error"] = _known(result["error"])
        results[name] = result
        print(name, result, flush=True)
    return section(results, size)


if __name__ == "__main__":
    main()
