"""A writer of the paths that linear layers have in transformers' classes, for the tests.

Run it by hand, in the environment of ``scripts/golden_encoders.py``:

    /tmp/golden/bin/python -m scripts.golden_module_names

The file has, by model type and class, the paths of linear layers, with ``N`` in place of numbers,
of models of the default config. GPT-2's are of the class ``Conv1D``, whose weights are transposed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

from scripts.golden_encoders import lines

FILE = Path(__file__).parent.parent / "tests" / "golden" / "module_names.json"
#: ``MODEL_TYPES``: those that mlx_lm and this package have in common with transformers.
MODEL_TYPES = re.findall(
    r"\S+",
    """
afmoe apertus bailing_hybrid bitnet cohere cohere2 dbrx deepseek_v2 deepseek_v3 deepseek_v32 dots1
ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4
gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj
granite granitemoe granitemoehybrid helium hunyuan_v1_dense idefics3 internlm3 internvl jamba
kimi_k25 kimi_linear laguna lfm2 lfm2_moe llama llama4 llama4_text llava llava_next longcat_flash
mamba mamba2 mellum mimo_v2_flash minicpm3 minimax minimax_m3_vl ministral3 mistral mistral3
mixtral muse_glimmer muse_spark nanochat nemotron nemotron_h olmo2 olmo3 olmo_hybrid olmoe opt phi
phi3 phimoe qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next
qwen3_vl qwen3_vl_moe recurrent_gemma seed_oss smollm3 smolvlm solar_open stablelm starcoder2
bert deberta-v2 distilbert electra modernbert mpnet nomic_bert qwen3_5_text qwen3_5_moe_text
roberta xlm-roberta
""",
)
#: ``CHANGED``: fields without which the default config is of no model.
CHANGED: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "nemotron": {"num_key_value_heads": 8},
}
MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_MAPPING_NAMES,
)


def main() -> None:
    """Write the file."""
    names = {model_type: classes_of(model_type) for model_type in MODEL_TYPES}
    FILE.write_text(lines(names), encoding="utf-8")
    for model_type, classes in names.items():
        print(model_type, {name: len(paths) for name, paths in classes.items()})


def classes_of(model_type: str) -> dict[str, list[str]]:
    """Return the paths of linear layers by class; classes that cannot be made are left out."""
    classes: dict[str, list[str]] = {}
    for mapping in MAPPINGS:
        name = mapping.get(model_type)
        if not isinstance(name, str):
            continue
        try:
            classes[name] = paths_of(model_type, name)
        except Exception as problem:  # noqa: BLE001 - what needs other packages is left out
            print(f"{model_type} {name}: {type(problem).__name__}: {str(problem)[:100]}")
    return classes


def paths_of(model_type: str, name: str) -> list[str]:
    """Return the paths of linear layers of a class."""
    config: Any = transformers.AutoConfig.for_model(model_type, **CHANGED.get(model_type, {}))
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    linear = (torch.nn.Linear, Conv1D)
    paths = (path for path, module in model.named_modules() if isinstance(module, linear))
    return sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "N", path) for path in paths})


if __name__ == "__main__":
    main()
