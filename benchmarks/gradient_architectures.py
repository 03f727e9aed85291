"""Tries the gradients of every architecture, and writes benchmarks/results/gradients.md.

``python -m benchmarks.gradient_architectures`` takes tiny random float32 weights on the CPU, and a
session tries each when it is opened.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm
import numpy as np

from benchmarks.architectures import names
from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.peers import child_process
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.gradients import GradientForm, LossKind, LossSpec, LossTarget
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.pooling.encoder_runner import EncoderRunner
from mlx_parallm.worker.training.trained_model import TrainedModel
from tests.builders.architectures.configs import VOCAB_SIZE, config_of
from tests.builders.architectures.trial import build
from tests.encoder_folders import golden_names, read_golden, write_golden
from tests.gradient_sessions import GradientSession, Rows, choice_rows, trained_decoder

PAGE = Path(__file__).parent / "results" / "gradients.md"
# PACKED: an architecture whose weights are packed too, to this many bits.
PACKED, BITS = "llama", 8
# BATCH: architectures that a process tries, for so many seconds at most.
BATCH, TIMEOUT_S = 12, 1800
# STEPS: sizes of central differences; experts of tokens change within larger ones.
STEPS = (1e-3, 1e-4, 3e-5)
ENCODER = "_masked_lm"
INTRO = """# Gradients by architecture

`python -m benchmarks.gradient_architectures` wrote this page, with mlx_lm {version} on the CPU.
Models have tiny random float32 weights, and a LoRA of rank 4 in all linear layers.

A session that takes gradients tries when it is opened whether stages, a layer each, give the bits
of one graph.
If they do, its gradients are *staged* beside streams; if not, they are always one graph (*whole*).
Where more than hidden states passes between layers, stages lack a part of the gradient.
The difference is the largest one between both, in parts of the gradient's largest number.
Stages fail where a model calls its layers otherwise than once each, in order and by position.
The error is that of the directional derivative against a central difference.
The loss is DPO, and the cross entropy of two words for masked LMs.

{summary}

| architecture | form | staged and whole | error |
|---|---|---|---|
"""


def try_one(name: str) -> dict[str, Any]:
    """Return form, difference and error of an architecture; or why it takes no gradients."""
    try:
        model, kind, rows = _model(name)
    except InvalidRequestError as refusal:
        return {"refused": str(refusal)}
    except (*MODEL_ERRORS, ImportError) as failure:
        return {"failed": f"{type(failure).__name__}: {failure}"}
    try:
        session = GradientSession(model, rows[0][:2])
    except InvalidRequestError as refusal:
        return {"refused": str(refusal)}
    spec = LossSpec(kind=kind)
    whole = session.gradient(spec, rows)
    form = session.session.gradients.form
    session.session.gradients.form = GradientForm.STAGED
    try:
        staged = session.gradient(spec, rows, staged=True)
        difference = float(np.abs(staged - whole).max() / np.abs(whole).max())
    except MODEL_ERRORS as failure:
        difference = str(failure)
    error = min(session.error(spec, rows, step) for step in STEPS)
    return {"form": form.value, "difference": difference, "error": error}


def _model(name: str) -> tuple[TrainedModel, LossKind, Rows]:
    """Return a model, and rows for its loss."""
    if name.endswith(ENCODER):
        with tempfile.TemporaryDirectory() as folder:
            loaded = load_encoder(write_golden(Path(folder), read_golden(name)))
            return EncoderRunner(loaded, VectorSpec()).adapters, LossKind.CROSS_ENTROPY, _words()
    architecture, _, packed = name.partition(", ")
    model = build(config_of(architecture))
    if packed:
        nn.quantize(model, group_size=32, bits=BITS)
    rows = choice_rows(LossKind.DPO, VOCAB_SIZE)
    return trained_decoder(model, VOCAB_SIZE), LossKind.DPO, rows


def _words() -> Rows:
    """Return rows that complete texts by one of two words."""
    texts = ((5, 6, 7, 8), (9, 8, 4), (5, 6, 7, 8, 9, 10))
    inputs = [
        PoolingInput(text, "mlm", places=(len(text) - 1,), candidates=(3, 9)) for text in texts
    ]
    return inputs, [LossTarget(label=row % 2) for row in range(len(texts))]


def run(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return ``try_one``'s results from another process, with ``failed`` for what ends it."""
    results: dict[str, dict[str, Any]] = {}
    while rest := [name for name in names if name not in results]:
        target = ["benchmarks.gradient_architectures", "--only", *rest]
        done = child_process.run(
            target, timeout_s=TIMEOUT_S, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        # Some models print while they are built.
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
        results |= dict(zip(rest, map(json.loads, lines), strict=False))
        if len(lines) < len(rest):
            last = (done.stderr.strip().splitlines() or ["failed"])[-1]
            results[rest[len(lines)]] = {"failed": last}
        print(results, flush=True)
    return results


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the page."""
    tried = {name: result for name, result in results.items() if "form" in result}
    counts = [sum(result["form"] == form for result in tried.values()) for form in GradientForm]
    summary = (
        f"{counts[0]} of {len(tried)} have staged gradients, {counts[1]} whole ones; "
        f"the largest error is {max(result['error'] for result in tried.values()):.1e}."
    )
    text = INTRO.format(version=mlx_lm.__version__, summary=summary)
    for name, result in tried.items():
        difference = result["difference"]
        shown = "stages fail" if isinstance(difference, str) else f"{difference:.0e}"
        shown = "equal bits" if difference == 0 else shown
        text += f"| {name} | {result['form']} | {shown} | {result['error']:.0e} |\n"
    for heading, key in (("Refused", "refused"), ("Not tried", "failed")):
        rows = [f"- {name}: {r[key][:200]}\n" for name, r in results.items() if key in r]
        text += f"\n{heading}:\n\n" + "".join(rows) if rows else ""
    return text


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="try these, and print a result for each")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    for name in options.only or ():
        print(json.dumps(try_one(name)), flush=True)
    if options.only:
        return
    encoders = [name for name in golden_names() if name.endswith(ENCODER)]
    every = [*names(), f"{PACKED}, {BITS} bits", *encoders]
    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for part in pool.map(run, (every[at : at + BATCH] for at in range(0, len(every), BATCH))):
            results |= part
    ordered = {name: results[name] for name in every}
    options.output.write_text(page(ordered), encoding="utf-8")


if __name__ == "__main__":
    main()
