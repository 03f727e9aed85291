"""A writer of TRL's values for tiny models with a value head, for the tests.

Run it by hand, in the environment of ``scripts/golden_encoders.py`` with TRL:

    /tmp/golden/bin/pip install --no-deps trl==0.24.0 accelerate
    /tmp/golden/bin/python -m scripts.golden_value_heads

A file holds the config of the model, names and shapes of the weights that TRL saved, inputs, and
the value of the state after each token.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors.numpy import load_file
from trl import AutoModelForCausalLMWithValueHead  # pyright: ignore[reportMissingImports]

from scripts.golden_decoder_cases import GPT2, QWEN3
from scripts.golden_encoders import lines, numbers
from tests.golden_weights import golden_weight

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "value_heads"
INPUTS = [[42, 17, 77, 14, 80, 10, 84, 69, 21, 6, 81], [76, 11, 30]]
TIED = {**QWEN3, "tie_word_embeddings": True}
UNTIED = {**QWEN3, "tie_word_embeddings": False}
#: CASES: names of files, types of models, their classes in transformers, and their configs.
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("gpt2", "gpt2", "GPT2LMHeadModel", GPT2),
    ("llama", "llama", "LlamaForCausalLM", UNTIED),
    ("qwen3", "qwen3", "Qwen3ForCausalLM", TIED),
]


def main() -> None:
    """Write the files of all cases."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, model_type, architecture, fields in CASES:
        text = lines(golden_values(model_type, architecture, fields))
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"{name}: {len(text)} bytes")


def golden_values(model_type: str, architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a case's file."""
    config = transformers.AutoConfig.for_model(model_type, **fields)
    config._attn_implementation = "eager"
    base = getattr(transformers, architecture)(config)
    model: Any = AutoModelForCausalLMWithValueHead.from_pretrained(base).eval()
    with torch.no_grad():
        for part, prefix in ((model.pretrained_model, ""), (model.v_head, "v_head.")):
            for name, weight in part.named_parameters():
                array = golden_weight(f"{prefix}{name}", list(weight.shape))
                weight.copy_(torch.from_numpy(array))
        values = [model(input_ids=torch.tensor([ids]))[2][0] for ids in INPUTS]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(f"{folder}/model.safetensors")
    return {
        "config": {**fields, "model_type": model_type, "architectures": [architecture]},
        "weights": {name: list(array.shape) for name, array in saved.items()},
        "inputs": {"input_ids": INPUTS},
        "values": numbers(values),
    }


if __name__ == "__main__":
    main()
