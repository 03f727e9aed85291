"""A writer of transformers' results for tiny models, for the tests: tests/golden.

Run it by hand, in an environment of its own that has torch:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors numpy
    /tmp/golden/bin/python -m scripts.golden_encoders [--only part-of-a-name]

A case is a config and a class of transformers. Weights are made from their names
(``tests/golden_weights.py``), so a file holds their names and shapes only, beside the config, the
inputs and the results: last hidden states, pooled vectors, logits.

Checkpoints whose code came with them (NomicBERT, GTE) have names of their own: transformers reads
them by its own renaming, and what the tests load has the original names.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors.numpy import save_file

from scripts.golden_decoder_cases import (
    DECODER_CASES,
    GENERATOR_CASES,
    DecoderCase,
    GeneratorCase,
)
from scripts.golden_encoder_cases import CASES, GoldenCase, RemoteFormat
from scripts.golden_rotary_cases import ROTARY_CASES
from tests.golden_weights import golden_weight

FOLDER = Path(__file__).parent.parent / "tests" / "golden"
DIGITS = 7


def main() -> None:
    """Write the files of all cases, or of those whose names contain ``--only``."""
    parser = argparse.ArgumentParser(description="Golden values of encoders and decoders.")
    parser.add_argument("--only", default="", help="a part of the names of the cases to write")
    only = parser.parse_args().only
    cases: list[GoldenCase] = [*CASES, *ROTARY_CASES, *DECODER_CASES, *GENERATOR_CASES]
    for case in cases:
        if only in case.name:
            text = lines(golden_values(case))
            folder = FOLDER / folder_of(case)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{case.name}.json").write_text(text, encoding="utf-8")
            print(f"{case.name}: {len(text)} bytes")


def folder_of(case: GoldenCase) -> str:
    """Return the name of the folder for a case's file."""
    if isinstance(case, GeneratorCase):
        return "generators"
    return "decoders" if isinstance(case, DecoderCase) else "encoders"


def golden_values(case: GoldenCase) -> dict[str, Any]:
    """Return config, weights by name and shape, inputs and results of a case."""
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    config._attn_implementation = "eager"
    kind = getattr(transformers, case.architecture)
    if case.remote is not None:
        model = _from_remote(case.remote, config, kind)
        shapes = case.remote.weights
        written = {**case.remote.config, "architectures": [case.remote.architecture]}
    else:
        model = kind(config).eval()
        shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(torch.from_numpy(golden_weight(name, shapes[name])))
        architectures = [case.architecture]
        written = {**case.config, "model_type": case.model_type, "architectures": architectures}
    return {
        "config": written,
        "weights": shapes,
        **({"chosen": case.chosen} if isinstance(case, DecoderCase) and case.chosen else {}),
        "inputs": inputs_of(case),
        **_results(case, model),
    }


def _from_remote(remote: RemoteFormat, config: Any, kind: Any) -> Any:
    """Return the transformers model of a checkpoint with the names of its own code.

    Raises:
        ValueError: transformers has no parameter for some weight.
    """
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        weights = {name: golden_weight(name, shape) for name, shape in remote.weights.items()}
        save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
        model, report = kind.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    if any(report[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"transformers read {kind.__name__} with {report}")
    if scaling := remote.config.get("rope_scaling"):
        rotary = model.base_model.rotary_emb
        theta = torch.tensor(float(remote.config["rope_theta"]))
        rotary.inv_freq.copy_(ntk_frequencies(theta, 2 * len(rotary.inv_freq), scaling))
    return model.eval()


def ntk_frequencies(theta: torch.Tensor, dims: int, scaling: dict[str, Any]) -> torch.Tensor:
    """Return radians per position and pair of dimensions, for GTE's ``rope_scaling`` of type ntk.

    transformers does not have this scaling; the formulas are those of
    https://kexue.fm/archives/9706, so these values are from a second implementation of our own.
    """
    factor = torch.tensor(float(scaling["factor"]))
    pair = torch.arange(dims // 2)
    mixed = scaling.get("mixed_b")
    if mixed is None:
        return (theta * factor) ** (-2 * pair / dims) / factor ** (2 / dims)
    growth = torch.log(factor) / (dims / 2) ** mixed
    return theta ** (-2 * pair / dims) * torch.exp(-growth * (pair + 1) ** mixed)


def inputs_of(case: GoldenCase) -> dict[str, Any]:
    """Return ids of sequences of several lengths, with token types if the case has them."""
    random = np.random.RandomState(case.seed)
    ids = [random.randint(5, case.vocab_size, size=length).tolist() for length in case.lengths]
    types = [[int(i >= len(row) // 2) for i in range(len(row))] for row in ids]
    return {"input_ids": ids, "token_type_ids": types if case.token_types else None}


def _results(case: GoldenCase, model: Any) -> dict[str, Any]:
    """Return the model's outputs for the padded batch, without those of padding."""
    inputs = inputs_of(case)
    lengths = [len(row) for row in inputs["input_ids"]]
    arguments = {
        "input_ids": _padded(inputs["input_ids"], case.pad_id),
        "attention_mask": _padded([[1] * length for length in lengths], 0),
    }
    if case.token_types:
        arguments["token_type_ids"] = _padded(inputs["token_type_ids"], 0)
    with torch.no_grad():
        base = model.base_model(**arguments)
        whole = model(**arguments)
    pooled = getattr(base, "pooler_output", None) if whole.keys() == base.keys() else None
    logits = whole.get(case.logits)
    chosen = case.chosen if isinstance(case, DecoderCase) else None
    if chosen is not None:
        rows = [row[length - 1] for row, length in zip(logits, lengths, strict=True)]
        logits = torch.stack([row[chosen[0]] - row[chosen[1]] for row in rows])[:, None]
    if logits is not None and logits.ndim == 3:
        # A masked LM has many logits, so two positions of a sequence are enough.
        is_long = logits.shape[-1] >= 10 and not isinstance(case, GeneratorCase)
        shown = [min(length, 2) if is_long else length for length in lengths]
        logits = [row[:count] for row, count in zip(logits, shown, strict=True)]
    hidden = [row[:length] for row, length in zip(base[0], lengths, strict=True)]
    return {
        "hidden": numbers(hidden),
        "pooled": None if pooled is None else numbers(list(pooled)),
        "logits": None if logits is None else numbers(list(logits)),
    }


def _padded(rows: list[list[int]], pad: int) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [pad] * (longest - len(row)) for row in rows])


def numbers(arrays: list[torch.Tensor]) -> list[Any]:
    """Return arrays as nested lists of rounded numbers."""

    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(item) for item in value]
        return float(f"{value:.{DIGITS}g}")

    return [rounded(array.tolist()) for array in arrays]


def lines(values: dict[str, Any]) -> str:
    """Return JSON with a line for each key."""
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
