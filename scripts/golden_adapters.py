"""A writer of PEFT's results for adapters of tiny pooling models, for the tests.

Run it by hand, in the environment of ``scripts/golden_encoders.py`` with PEFT in it:

    /tmp/golden/bin/pip install peft==0.21.2
    /tmp/golden/bin/python -m scripts.golden_adapters

The models are those of ``tests/golden/encoders`` and ``tests/golden/decoders``. A file holds the
``adapter_config.json`` that PEFT wrote, the names and shapes of the tensors that it saved, whose
values are made from their names (``tests/golden_weights.py``), the inputs and the results.
"""

from __future__ import annotations

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

from tests.golden_weights import golden_adapter_weight, golden_weight

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
DIGITS = 7


@dataclass(frozen=True, slots=True)
class AdapterCase:
    """An adapter that PEFT can make.

    Attributes:
        name: name of the file.
        base: folder and name of the golden model.
        task: PEFT's ``task_type``.
        lora: further arguments of ``LoraConfig``.
        trained: the class that the adapter is trained on, if it is not the golden model's; the
            adapter then brings the head.
    """

    name: str
    base: str
    task: str
    lora: dict[str, Any] = field(default_factory=dict)
    trained: str | None = None


QUERIES: dict[str, Any] = {"target_modules": ["query", "value"]}
POOLED: dict[str, Any] = {"modules_to_save": ["classifier", "pooler"]}
CASES = [
    AdapterCase("bert_sequence", "encoders/bert_sequence", "SEQ_CLS", QUERIES),
    AdapterCase(
        "roberta_sequence",
        "encoders/roberta_sequence",
        "SEQ_CLS",
        {"target_modules": ["query", "key", "output.dense"], "use_rslora": True},
    ),
    AdapterCase("bert_token", "encoders/bert_token", "TOKEN_CLS", QUERIES),
    AdapterCase(
        # The projections of relative positions have no input of the batch.
        "deberta_sequence",
        "encoders/deberta_v2_sequence",
        "SEQ_CLS",
        {"target_modules": ["query_proj", "pos_key_proj"], **POOLED},
    ),
    AdapterCase(
        # The projections of tokens also project positions here.
        "deberta_new_head",
        "encoders/deberta_v2",
        "SEQ_CLS",
        {"target_modules": ["query_proj", "key_proj"], **POOLED},
        "DebertaV2ForSequenceClassification",
    ),
    AdapterCase(
        "bert_features",
        "encoders/bert",
        "FEATURE_EXTRACTION",
        {"target_modules": ["query", "key", "dense"], "use_dora": True},
    ),
    AdapterCase(
        "distilbert_sequence",
        "encoders/distilbert_sequence",
        "SEQ_CLS",
        {
            "target_modules": ["q_lin", "v_lin", "lin2"],
            "modules_to_save": ["pre_classifier", "classifier"],
        },
    ),
    AdapterCase(
        "modernbert_sequence",
        "encoders/modernbert_sequence",
        "SEQ_CLS",
        {"target_modules": ["Wqkv", "Wi"], "modules_to_save": ["head", "classifier"]},
    ),
    AdapterCase(
        "mpnet_sequence", "encoders/mpnet_sequence", "SEQ_CLS", {"target_modules": ["q", "v"]}
    ),
    AdapterCase("electra_token", "encoders/electra_token", "TOKEN_CLS", QUERIES),
    AdapterCase("llama_sequence", "decoders/llama_sequence", "SEQ_CLS"),
    AdapterCase("qwen3_token", "decoders/qwen3_token", "TOKEN_CLS"),
    AdapterCase(
        "qwen3_features",
        "decoders/qwen3_model",
        "FEATURE_EXTRACTION",
        {"target_modules": ["q_proj", "o_proj", "down_proj"], "use_dora": True},
    ),
    AdapterCase(
        "bert_new_head", "encoders/bert", "SEQ_CLS", QUERIES, "BertForSequenceClassification"
    ),
    AdapterCase(
        "qwen3_new_head", "decoders/qwen3_model", "SEQ_CLS", {}, "Qwen3ForSequenceClassification"
    ),
]


def main() -> None:
    """Write the files of all cases."""
    folder = GOLDEN / "adapters"
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        values = golden_values(case)
        parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        text = "{\n" + ",\n".join(parts) + "\n}\n"
        (folder / f"{case.name}.json").write_text(text, encoding="utf-8")
        print(f"{case.name}: {len(text)} bytes")


def golden_values(case: AdapterCase) -> dict[str, Any]:
    """Return config, tensors by name and shape, inputs and results of a case."""
    base = json.loads((GOLDEN / f"{case.base}.json").read_text(encoding="utf-8"))
    config = LoraConfig(task_type=case.task, r=4, lora_alpha=6, **case.lora)
    model = get_peft_model(_base_model(base, case.trained), config).eval()
    state = get_peft_model_state_dict(model)
    values = {name: golden_adapter_weight(name, tensor.shape) for name, tensor in state.items()}
    set_peft_model_state_dict(
        model, {name: torch.from_numpy(array) for name, array in values.items()}
    )
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        saved = load_file(f"{path}/adapter_model.safetensors")
        written = json.loads(Path(f"{path}/adapter_config.json").read_text())
    for name, array in saved.items():
        np.testing.assert_array_equal(array, golden_adapter_weight(name, array.shape))
    ids = base["inputs"]["input_ids"]
    return {
        "base": case.base,
        "adapter_config": {
            # PEFT's sets have no fixed order.
            name: sorted(value) if isinstance(value, list) else value
            for name, value in written.items()
            if value
        },
        "tensors": {name: list(array.shape) for name, array in sorted(saved.items())},
        "input_ids": ids,
        **_results(model, ids),
    }


def _base_model(golden: dict[str, Any], trained: str | None) -> Any:
    config = {**golden["config"]}
    architecture = trained or config["architectures"][0]
    labels = {"num_labels": 3} if trained else {}
    made = transformers.AutoConfig.for_model(config.pop("model_type"), **config, **labels)
    made._attn_implementation = "eager"
    made.pad_token_id = made.pad_token_id or 0
    model = getattr(transformers, architecture)(made).eval()
    trunk = {name.removeprefix(f"{model.base_model_prefix}."): name for name in golden["weights"]}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            bare = name.removeprefix(f"{model.base_model_prefix}.")
            if bare in trunk:
                shape = golden["weights"][trunk[bare]]
                weight.copy_(torch.from_numpy(golden_weight(trunk[bare], shape)))
    return model


def _results(model: Any, ids: list[list[int]]) -> dict[str, Any]:
    """Return logits, or hidden states if there are none, without padding."""
    longest = max(map(len, ids))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    with torch.no_grad():
        # A decoder's classifier finds the last token by the padding, so each text runs alone.
        outputs = [
            model(
                input_ids=padded[row : row + 1, : len(text_ids)],
                attention_mask=mask[row : row + 1, : len(text_ids)],
            )
            for row, text_ids in enumerate(ids)
        ]
    field_name = "logits" if "logits" in outputs[0] else "last_hidden_state"
    return {field_name: [_rounded(output[field_name][0].tolist()) for output in outputs]}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}")


if __name__ == "__main__":
    main()
