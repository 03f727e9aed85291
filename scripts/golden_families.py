"""A writer of folders that transformers saves, and of what it computes: tests/golden/families.

Run it by hand, in an environment of its own that has torch:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors numpy
    /tmp/golden/bin/python -m scripts.golden_families [--only part-of-a-name]

A file holds ``config.json`` as transformers writes it, names and shapes of the weights that it
saves (``tests/golden_weights.py`` makes their numbers), a prompt, its logits at the last tokens,
and the tokens that greedy decoding chooses.
"""

from __future__ import annotations

import argparse
import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

from scripts.golden_encoders import lines, numbers
from scripts.golden_family_cases import BASES, FAMILIES, SIZES, FamilyCase
from tests.golden_weights import golden_weight, weighted_sum

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "families"
# Longer than the window of attention.
PROMPT_TOKENS = 20
SHOWN_LOGITS = 2
NEW_TOKENS = 8


def main() -> None:
    """Write the files of all cases, or of those whose names contain ``--only``."""
    parser = argparse.ArgumentParser(description="Golden values of decoders' families.")
    parser.add_argument("--only", default="", help="a part of the names of the cases to write")
    only = parser.parse_args().only
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in FAMILIES:
        if only in case.name:
            text = lines(golden_values(case))
            (FOLDER / f"{case.name}.json").write_text(text, encoding="utf-8")
            print(f"{case.name}: {len(text)} bytes")


def golden_values(case: FamilyCase) -> dict[str, Any]:
    """Return config, weights by name and shape, prompt and results of a case.

    Raises:
        ValueError: transformers does not read what it has saved.
    """
    config = config_of(case)
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind(config).save_pretrained(folder)
        _omit(folder / "config.json", case.omitted)
        shapes = _shapes(folder)
        weights = {name: np.asarray(golden_weight(name, shape)) for name, shape in shapes.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        model, report = kind.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        if any(report[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            raise ValueError(f"transformers read {case.name} with {report}")
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    memory = _in_memory(model, shapes)
    return {"config": written, "weights": shapes, **memory, **results_of(model.eval())}


def config_of(case: FamilyCase) -> Any:
    """Return the config of a case, with other bases of RoPE than those of its class."""
    kind = type(transformers.AutoConfig.for_model(case.model_type or case.name))
    known = {name for each in kind.__mro__ for name in getattr(each, "__annotations__", {})}
    known |= inspect.signature(kind.__init__).parameters.keys()
    fields = {name: value for name, value in SIZES.items() if name in known} | case.config
    rope = getattr(kind(**fields), "rope_parameters", None)
    if not rope:
        return kind(**fields)
    if "full_attention" in rope:
        bases = dict.fromkeys(rope, BASES["full_attention"]) if case.one_base else BASES
        parameters = {name: {**rope[name], "rope_theta": bases[name]} for name in rope}
    else:
        parameters = {**rope, "rope_theta": BASES["full_attention"], **case.rope}
    return kind(**fields, rope_parameters=parameters)


def _omit(file: Path, names: tuple[str, ...]) -> None:
    fields = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({key: fields[key] for key in fields if key not in names}))


def _shapes(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def _in_memory(model: Any, shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Return parameters that have other names in memory than in a folder: shapes and sums."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    others = {
        name: [list(array.shape), weighted_sum(array.detach().numpy())]
        for name, array in named.items()
        if name in model.state_dict() and name not in shapes
    }
    saved = sorted(shapes.keys() - named.keys())
    return {"memory": others, "only_saved": saved} if others else {}


def results_of(model: Any) -> dict[str, Any]:
    """Return a prompt and what the model makes of it."""
    ids = np.random.RandomState(1).randint(3, SIZES["vocab_size"], PROMPT_TOKENS).tolist()
    chosen = list(ids)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -SHOWN_LOGITS:]
        for _ in range(NEW_TOKENS):
            last = model(torch.tensor([chosen]), use_cache=False).logits[0, -1]
            chosen.append(int(last.argmax()))
    return {"ids": ids, "logits": numbers([logits])[0], "tokens": chosen[len(ids) :]}


if __name__ == "__main__":
    main()
