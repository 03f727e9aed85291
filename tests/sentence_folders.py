"""Folders of sentence-transformers; needs no MLX, for their golden values come from torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

from tests.golden_weights import golden_weight
from tests.word_tokenizer import word_tokenizer

GOLDEN = Path(__file__).parent / "golden"
DIMS = 8
#: Words of the usual vocabulary that are others here.
MARKS = {"w6": ",", "w7": ".", "w8": "[unused0]", "w9": "[unused1]"}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
DENSE = {
    "in_features": 32,
    "out_features": DIMS,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
}


def write_stanford(folder: Path) -> Path:
    """``HF_ColBERT``: queries of 12 tokens, to whose masks nothing attends."""
    trunk = _read("bert")
    names = {f"bert.{name}": shape for name, shape in trunk["weights"].items()}
    config = trunk["config"] | {"architectures": ["HF_ColBERT"]}
    _write_model(folder, config, names | {"linear.weight": [DIMS, 32]})
    _write_tokenizer(folder, _tokenizer(99))
    _dump(folder / "artifact.metadata", {"query_maxlen": 12, "doc_maxlen": 20, "dim": DIMS})
    return folder


def write_pylate(folder: Path) -> Path:
    """ModernBERT in PyLate's form: most of its layers look at tokens nearby only."""
    trunk = _read("modernbert")
    _write_model(folder, trunk["config"] | {"local_attention": 16}, trunk["weights"])
    tokenizer = _tokenizer(97)
    # As PyLate adds them; text is made lower-case, so it never has them.
    tokenizer.add_tokens([AddedToken("[Q] "), AddedToken("[D] ")])
    _write_tokenizer(folder, tokenizer)
    _dump(folder / "sentence_bert_config.json", {"max_seq_length": 11})
    settings = {
        "model_type": "ColBERT",
        "prompts": {},
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 12,
        "document_length": 24,
        "attend_to_expansion_tokens": False,
        "skiplist_words": [",", "w20"],
        "do_query_expansion": True,
    }
    _dump(folder / "config_sentence_transformers.json", settings)
    _write_dense(folder, {})
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    _write_modules(folder, kinds)
    return folder


def write_native(folder: Path) -> Path:
    """Write the form of sentence-transformers 6: prompts are texts, and queries may be longer."""
    trunk = _read("bert")
    _write_model(folder, trunk["config"], trunk["weights"])
    _write_tokenizer(folder, _tokenizer(99))
    settings = {
        "model_type": "MultiVectorEncoder",
        "prompts": {"query": "w30 w31 ", "document": "w32 "},
        "default_prompt_name": None,
        "similarity_fn_name": "meanmaxsim",
    }
    _dump(folder / "config_sentence_transformers.json", settings)
    expansion = {"strategy": "min", "attend": True, "token": "w90", "length": 10}
    own = {
        "transformer_task": "feature-extraction",
        "modality_config": {
            "text": {"method": "forward", "method_output_name": "last_hidden_state"}
        },
        "module_output_name": "token_embeddings",
        "document_length": 30,
        "query_expansion": expansion,
    }
    _dump(folder / "sentence_bert_config.json", own)
    of_tokens = {"module_input_name": "token_embeddings"}
    _write_dense(folder, of_tokens)
    mask = {"skiplist_words": [".", "w33"], "skiplist_tasks": ["query", "document"]}
    _dump(folder / "2_MultiVectorMask" / "config.json", mask)
    _dump(folder / "3_Normalize" / "config.json", of_tokens)
    base = "sentence_transformers.base.modules"
    kinds = {
        "": f"{base}.transformer.Transformer",
        "1_Dense": f"{base}.dense.Dense",
        "2_MultiVectorMask": (
            "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
        ),
        "3_Normalize": f"{base}.normalize.Normalize",
    }
    _write_modules(folder, kinds)
    return folder


def write_prompted(folder: Path) -> Path:
    """Write an embedder in its oldest layout, whose vectors leave the tokens of prompts out."""
    trunk = _read("bert")
    own = folder / "0_Transformer"
    _write_model(own, trunk["config"], trunk["weights"])
    _write_tokenizer(own, _tokenizer(99))
    _dump(own / "sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": False})
    poolings = ("cls_token", "mean_tokens", "weightedmean_tokens", "lasttoken")
    pooling = {f"pooling_mode_{pooling_name}": True for pooling_name in poolings}
    pooling |= {"word_embedding_dimension": 32, "include_prompt": False}
    _dump(folder / "1_Pooling" / "config.json", pooling)
    settings = {
        "prompts": {"query": "w30 w31 ", "passage": "w32 "},
        "default_prompt_name": None,
    }
    _dump(folder / "config_sentence_transformers.json", settings)
    base = "sentence_transformers.models"
    kinds = {"0_Transformer": f"{base}.Transformer", "1_Pooling": f"{base}.Pooling"}
    _write_modules(folder, kinds)
    return folder


#: Models that compare tokens.
WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "stanford": write_stanford,
    "pylate": write_pylate,
    "native": write_native,
}


def _read(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / "encoders" / f"{name}.json").read_text(encoding="utf-8"))


def _tokenizer(num_words: int) -> Tokenizer:
    text = word_tokenizer(num_words).to_str()
    for word, mark in MARKS.items():
        text = text.replace(f'"{word}":', f'"{mark}":')
    return Tokenizer.from_str(text)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    _dump(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_model(folder: Path, config: dict[str, Any], shapes: Mapping[str, Any]) -> None:
    _dump(folder / "config.json", config)
    _save(folder, shapes)


def _write_dense(folder: Path, config: dict[str, Any]) -> None:
    _dump(folder / "1_Dense" / "config.json", DENSE | config)
    _save(folder / "1_Dense", {"linear.weight": [DIMS, 32]})


def _write_modules(folder: Path, kinds: Mapping[str, str]) -> None:
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": kind}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    _dump(folder / "modules.json", modules)


def _save(folder: Path, shapes: Mapping[str, Any]) -> None:
    weights = {name: golden_weight(name, shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _dump(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value), encoding="utf-8")
