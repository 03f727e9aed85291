"""Golden decoders as folders on disk (scripts/golden_decoder_cases.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.encoder_folders import write_golden

GOLDEN = Path(__file__).parent / "golden" / "decoders"
GENERATORS = Path(__file__).parent / "golden" / "generators"


def decoder_names() -> list[str]:
    return sorted(path.stem for path in GOLDEN.glob("*.json"))


def read_decoder(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def read_generator(name: str) -> dict[str, Any]:
    return json.loads((GENERATORS / f"{name}.json").read_text(encoding="utf-8"))


def assert_golden(model: Any, golden: dict[str, Any], atol: float = 1e-4) -> None:
    """Check the logits of a generator for each input alone."""
    for ids, expected in zip(golden["inputs"]["input_ids"], golden["logits"], strict=True):
        logits = model(mx.array([ids]))[0].astype(mx.float32)
        np.testing.assert_allclose(np.array(logits), np.array(expected), atol=atol)


def write_words(
    folder: Path, vocab_size: int, *, ends: str = "</s>", template: str | None = None
) -> None:
    """Write a tokenizer of words ``w5`` to ``wN`` that puts ``ends`` behind a text."""
    specials = ["<pad>", "<unk>", "</s>", "yes", "no"]
    words = specials + [f"w{number}" for number in range(len(specials), vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.add_special_tokens(specials[:3])
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"$A {ends}", special_tokens=[(ends, words.index(ends))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_decoder_of(folder: Path, golden_name: str) -> Path:
    """Write a decoder of the golden values with such a tokenizer."""
    golden = read_decoder(golden_name)
    write_golden(folder, golden)
    write_words(folder, golden["config"]["vocab_size"])
    return folder


def write_decoder_embedder(folder: Path) -> Path:
    """Qwen3 in the form of Qwen3-Embedding's folder: a bare model, last token, normalised."""
    golden = read_decoder("qwen3_model")
    golden["config"]["architectures"] = ["Qwen3ForCausalLM"]
    write_golden(folder, golden)
    write_words(folder, golden["config"]["vocab_size"])
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder
