"""A writer of sentence-transformers' cross-encoder scores: tests/golden/cross_encoder.json.

Run it by hand, in an environment of its own:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 sentence-transformers==6.2.0 numpy
    /tmp/golden/bin/python -m scripts.golden_cross_encoder

The model is BERT with one label; weights and tokenizer are those of the tests.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from sentence_transformers import CrossEncoder  # pyright: ignore[reportMissingImports]

from tests.golden_weights import golden_weight
from tests.word_tokenizer import word_tokenizer

FILE = Path(__file__).parent.parent / "tests" / "golden" / "cross_encoder.json"
CONFIG: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
}
PAIRS = [
    ["w10 w11 w12", "w20 w21"],
    ["w10 w11 w12", "w10 w11 w12 w30 w31 w32 w33 w34"],
    ["w10 w11 w12", "w44"],
    ["w60 w61", "w10 w98 w50 w51"],
    ["w7", "w7"],
]


def main() -> None:
    """Write the file."""
    config: Any = transformers.AutoConfig.for_model("bert", **CONFIG, num_labels=1)
    model = transformers.BertForSequenceClassification(config).eval()
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(golden_weight(name, shapes[name])))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=word_tokenizer(CONFIG["vocab_size"]),
            pad_token="[PAD]",
            model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        ).save_pretrained(folder)
        scorer = CrossEncoder(folder, device="cpu")
        values = {
            "scores": scorer.predict(PAIRS).tolist(),
            "logits": scorer.predict(PAIRS, activation_fn=torch.nn.Identity()).tolist(),
        }
    written = {
        **CONFIG,
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
    }
    golden = {"config": written, "weights": shapes, "pairs": PAIRS, **values}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items())
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
