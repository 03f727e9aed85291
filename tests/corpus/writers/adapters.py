"""Saves tiny models by transformers, and adapters of them by PEFT, with the logits of both.

``python -m tests.corpus.writers.adapters FOLDER`` writes ``FOLDER/index.json`` and the folders that
it names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from peft import LoraConfig, PeftModel, get_peft_model  # pyright: ignore[reportMissingImports]

IDS = [42, 17, 77, 14, 80, 10, 84]
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT: dict[str, Any] = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: Models by name: type, config, and the linear layers that adapters change.
MODELS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("llama", SIZES, ALL),
    "qwen3-tied": ("qwen3", {**SIZES, "head_dim": 8, "tie_word_embeddings": True}, ALL),
    "gemma2": ("gemma2", {**SIZES, "head_dim": 8, "hidden_size": 16}, ALL),
    "phi3": ("phi3", {**SIZES, "pad_token_id": 0}, ["qkv_proj", "o_proj", "gate_up_proj"]),
    "gpt2": ("gpt2", GPT, ["c_attn", "c_proj", "c_fc"]),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}, ["q_proj", "v_proj", "fc_in"]),
}
STARTS = (
    *(True, False, "gaussian", "eva", "orthogonal", "mica"),
    *("pissa", "pissa_niter_4", "olora", "loftq"),
)
EMBEDDED = {"target_modules": ["embed_tokens", "q_proj"]}
#: Settings of ``LoraConfig`` by name, beside ``init_lora_weights``.
SETTINGS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "ranks": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}},
    "bias": {"bias": "lora_only"},
    "embedding": EMBEDDED,
    "embedding and head": {**EMBEDDED, "ensure_weight_tying": True},
    "replicated layers": {"layer_replication": [[0, 2], [0, 2]]},
    "alora": {"alora_invocation_tokens": [7, 8]},
    "trained tokens": {"trainable_token_indices": [3, 4]},
    "head in full": {"modules_to_save": ["lm_head"]},
}


def base_of(name: str) -> Any:
    """Return a model with the same random weights each time."""
    model_type, config, _ = MODELS[name]
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(model_type, bos_token_id=1, eos_token_id=2, **config)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write_adapter(folder: Path, model: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Save an adapter with random factors; return its line of the index."""
    lora = {"target_modules": MODELS[model][2], "r": 4, "lora_alpha": 6, **settings}
    line: dict[str, Any] = {"model": model, "case": name, "folder": f"{model} {name}"}
    torch.manual_seed(1)
    adapted = get_peft_model(base_of(model), LoraConfig(task_type="CAUSAL_LM", **lora)).eval()
    first = folder / f"{model} {name} first"
    is_changed = str(settings.get("init_lora_weights", True)).startswith(("pissa", "olora"))
    if is_changed:
        # What PEFT needs to convert it later.
        adapted.peft_config["default"].init_lora_weights = True
        adapted.save_pretrained(str(first))
        adapted.peft_config["default"].init_lora_weights = settings["init_lora_weights"]
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key or "token_adapter" in key:
                parameter.add_(0.05 * torch.randn_like(parameter))
    adapted.save_pretrained(str(folder / line["folder"]))
    line["logits"] = logits_of(adapted)
    if is_changed:
        adapted.save_pretrained(
            str(folder / f"{model} {name} converted"),
            path_initial_model_for_weight_conversion=str(first),
        )
    return line


def logits_of(model: Any) -> list[float]:
    """Return the logits after the last token."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS])).logits[0, -1].tolist()


def lines_of(folder: Path, model: str) -> list[dict[str, Any]]:
    """Save all adapters of a model; what PEFT refuses is left out."""
    cases = {f"init {start}": {"init_lora_weights": start} for start in STARTS} | SETTINGS
    lines: list[dict[str, Any]] = []
    for name, settings in cases.items():
        try:
            line = write_adapter(folder, model, name, settings)
        except Exception as problem:  # noqa: BLE001 - not every class takes every setting
            print(f"{model} {name}: {type(problem).__name__}: {str(problem)[:100]}")
            continue
        lines.append(line)
        converted = folder / f"{model} {name} converted"
        if converted.exists():
            changed = PeftModel.from_pretrained(base_of(model), str(converted)).eval()
            lines.append(
                {
                    "model": model,
                    "case": f"{name}, converted",
                    "folder": converted.name,
                    "logits": logits_of(changed),
                }
            )
    return lines


def main(folder: Path) -> None:
    """Write everything."""
    index: list[dict[str, Any]] = []
    for model in MODELS:
        base_of(model).save_pretrained(str(folder / model))
        index += lines_of(folder, model)
    written = {"ids": IDS, "adapters": index}
    (folder / "index.json").write_text(json.dumps(written), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
