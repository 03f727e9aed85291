"""A writer of PEFT's results for adapters of tiny models that generate, for the tests.

Run it by hand, in the environment of ``scripts/golden_adapters.py``:

    /tmp/golden/bin/python -m scripts.golden_generator_adapters [--only part-of-a-name]

A file holds config and weights of the model as in ``scripts/golden_encoders.py``, the
``adapter_config.json`` that PEFT wrote, names and shapes of the tensors that it saved, the weights
of the model that it repeated among them, inputs, and the logits of their last tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from peft import (  # pyright: ignore[reportMissingImports]
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.numpy import load_file

from scripts.golden_decoder_cases import GPT2, OPT, QWEN3
from scripts.golden_encoders import lines, numbers
from tests.golden_weights import golden_adapter_weight, golden_weight

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "generator_adapters"
COPY = ".base_layer.weight"
INPUTS = [[42, 17, 77, 14, 80, 10, 84, 69, 21, 6, 81], [76, 11, 30]]
FALCON_H1: dict[str, Any] = {
    **QWEN3,
    "mamba_d_ssm": 32,
    "mamba_d_head": 8,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
    "mamba_rms_norm": False,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.25,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.75,
    "key_multiplier": 0.4,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.5,
    "mlp_multipliers": [0.75, 0.5],
    "ssm_multipliers": [0.5, 0.25, 0.75, 0.5, 1.25],
    "tie_word_embeddings": False,
}
GPTJ: dict[str, Any] = {**GPT2, "rotary_dim": 4, "tie_word_embeddings": False}
LFM2_MOE: dict[str, Any] = {
    **QWEN3,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "full_attention"],
    "num_dense_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "use_expert_bias": False,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
}


@dataclass(frozen=True, slots=True)
class AdapterCase:
    """An adapter that PEFT can make.

    Attributes:
        name: name of the file.
        model_type: the model's type.
        architecture: its class in transformers.
        config: its config.
        lora: further arguments of ``LoraConfig``.
    """

    name: str
    model_type: str
    architecture: str
    config: dict[str, Any]
    lora: dict[str, Any] = field(default_factory=dict)


def targets(*names: str, **more: Any) -> dict[str, Any]:
    """Return arguments of ``LoraConfig`` for modules with these names."""
    return {"target_modules": list(names), **more}


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# PEFT refuses the output projections of Mamba.
MAMBA = ("in_proj",)
TIED = {**QWEN3, "tie_word_embeddings": True}
UNTIED = {**QWEN3, "tie_word_embeddings": False}
QWEN3_CLASS = ("qwen3", "Qwen3ForCausalLM")
FALCON_CLASS = ("falcon_h1", "FalconH1ForCausalLM")
CASES = [
    AdapterCase("gpt2", "gpt2", "GPT2LMHeadModel", GPT2, targets("c_attn", "c_proj", "c_fc")),
    AdapterCase(
        "opt",
        "opt",
        "OPTForCausalLM",
        OPT,
        targets("q_proj", "k_proj", "v_proj", "out_proj", "fc1"),
    ),
    AdapterCase(
        "gptj", "gptj", "GPTJForCausalLM", GPTJ, targets("q_proj", "v_proj", "out_proj", "fc_in")
    ),
    AdapterCase(
        "lfm2_moe", "lfm2_moe", "Lfm2MoeForCausalLM", LFM2_MOE, targets("q_proj", "w1", "w2", "w3")
    ),
    AdapterCase("qwen3", *QWEN3_CLASS, UNTIED, targets(*ATTENTION, *MLP)),
    AdapterCase("qwen3_embedding", *QWEN3_CLASS, TIED, targets("embed_tokens", "q_proj")),
    AdapterCase(
        "qwen3_tied",
        *QWEN3_CLASS,
        TIED,
        targets("embed_tokens", "q_proj", ensure_weight_tying=True),
    ),
    AdapterCase("qwen3_head", *QWEN3_CLASS, UNTIED, targets("embed_tokens", "lm_head", "v_proj")),
    AdapterCase("qwen3_qalora", *QWEN3_CLASS, UNTIED, targets(*ATTENTION, use_qalora=True)),
    AdapterCase("falcon_h1", *FALCON_CLASS, FALCON_H1, targets(*ATTENTION, *MLP, *MAMBA)),
    AdapterCase(
        "falcon_h1_dora", *FALCON_CLASS, FALCON_H1, targets(*ATTENTION, *MLP, use_dora=True)
    ),
    AdapterCase(
        "falcon_h1_tables", *FALCON_CLASS, FALCON_H1, targets("embed_tokens", "lm_head", *MAMBA)
    ),
]


def main() -> None:
    """Write the files of all cases, or of those whose names contain ``--only``."""
    parser = argparse.ArgumentParser(description="Golden values of generators' adapters.")
    parser.add_argument("--only", default="", help="a part of the names of the cases to write")
    only = parser.parse_args().only
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if only in case.name:
            text = lines(golden_values(case))
            (FOLDER / f"{case.name}.json").write_text(text, encoding="utf-8")
            print(f"{case.name}: {len(text)} bytes")


def golden_values(case: AdapterCase) -> dict[str, Any]:
    """Return the content of a case's file."""
    base = _base_model(case)
    shapes = {name: list(weight.shape) for name, weight in base.named_parameters()}
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **case.lora)
    model = get_peft_model(base, lora).eval()
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    is_tied = bool(case.lora.get("ensure_weight_tying"))
    values = {name: torch.from_numpy(value_of(name, state, is_tied)) for name in state}
    set_peft_model_state_dict(model, values)
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        saved = load_file(f"{path}/adapter_model.safetensors")
        written = json.loads(Path(f"{path}/adapter_config.json").read_text())
    copies = {name for name in saved if name.endswith(COPY)}
    for name, array in saved.items():
        if name not in copies:
            np.testing.assert_array_equal(array, values[name].numpy())
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in INPUTS]
    return {
        "config": {
            **case.config,
            "model_type": case.model_type,
            "architectures": [case.architecture],
        },
        "weights": shapes,
        "adapter_config": {
            # PEFT's sets have no fixed order.
            name: sorted(value) if isinstance(value, list) else value
            for name, value in written.items()
            if value
        },
        "tensors": {
            name: list(array.shape) for name, array in sorted(saved.items()) if name not in copies
        },
        "copies": {name: _copied(name, shapes) for name in sorted(copies)},
        "input_ids": INPUTS,
        "logits": numbers(logits),
    }


def value_of(name: str, state: dict[str, Any], is_tied: bool) -> np.ndarray:
    """Return the value of a tensor; tied factors of a head have the values of the embedding's."""
    table, head = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
    tied = {
        f"{head}.lora_A.weight": f"{table}.lora_embedding_B",
        f"{head}.lora_B.weight": f"{table}.lora_embedding_A",
    }
    if is_tied and name in tied:
        source = tied[name]
        return golden_adapter_weight(source, tuple(state[source].shape)).T.copy()
    return golden_adapter_weight(name, tuple(state[name].shape))


def _copied(name: str, shapes: dict[str, Any]) -> str:
    """Return the parameter of the model that a file repeats; tied heads are the embedding."""
    source = name.removeprefix("base_model.model.").replace(COPY, ".weight")
    return source if source in shapes else "model.embed_tokens.weight"


def _base_model(case: AdapterCase) -> Any:
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    config._attn_implementation = "eager"
    model = getattr(transformers, case.architecture)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(golden_weight(name, list(weight.shape))))
    return model


if __name__ == "__main__":
    main()
