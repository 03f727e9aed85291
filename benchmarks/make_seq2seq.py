"""Make an encoder-decoder of random weights, with a tokenizer of one token for each word.

``python -m benchmarks.make_seq2seq FOLDER --shape t5-small``. Equal seeds give equal files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from mlx_parallm.models.decoder_classes import decoder_classes
from mlx_parallm.worker.weights.loader import DTYPES

PAD, EOS, UNK = SPECIALS = ("<pad>", "</s>", "<unk>")
T5: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "vocab_size": 32128,
    "feed_forward_proj": "relu",
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    "architectures": ["BartForConditionalGeneration"],
    "model_type": "bart",
    "is_encoder_decoder": True,
    "vocab_size": 50264,
    "activation_function": "gelu",
    "scale_embedding": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
}


def _t5(width: int, head: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"d_model": width, "d_kv": head, "d_ff": inner, "num_heads": heads}
    return T5 | sizes | {"num_layers": layers, "num_decoder_layers": layers} | more


def _bart(width: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", layers), ("ffn_dim", inner), ("attention_heads", heads))
    }
    return BART | sides | {"d_model": width, "max_position_embeddings": 1024} | more


#: ``SHAPES``: the shapes of checkpoints, and tiny ones for a CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "t5-small": _t5(512, 64, 2048, 6, 8, torch_dtype="float32"),
    "t5-3b": _t5(1024, 128, 16384, 24, 32, torch_dtype="bfloat16"),
    "tiny-t5": _t5(64, 16, 128, 2, 4, vocab_size=512, torch_dtype="float32"),
    "bart-large": _bart(1024, 4096, 12, 16, torch_dtype="bfloat16"),
    "tiny-bart": _bart(64, 128, 2, 4, vocab_size=512, torch_dtype="float32"),
}


def make_seq2seq(folder: Path, shape: str, seed: int = 0) -> Path:
    """Write a model of a shape to ``folder`` in Hugging Face's form, unless it is there already."""
    config = SHAPES[shape]
    stamp = folder / "made.json"
    made = json.dumps({"seed": seed} | config)
    if stamp.exists() and stamp.read_text() == made:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _save_tokenizer(config["vocab_size"], folder)
    weights = random_weights(config, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    stamp.write_text(made)
    return folder


def random_weights(config: Mapping[str, Any], seed: int) -> dict[str, mx.array]:
    """Return weights by the model's names, in the config's ``torch_dtype``.

    Matrices have the scale by which outputs are as large as inputs. T5 does not scale its scores,
    so its queries are smaller. Word embeddings are small: a head with the same table would repeat
    the last token otherwise.
    """
    mx.random.seed(seed)
    model_class, args_class = decoder_classes(dict(config))
    model: Any = model_class(args_class.from_dict(dict(config)))  # type: ignore[attr-defined]
    fresh: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    dtype = DTYPES[config["torch_dtype"]]
    for name, weight in fresh.items():
        if weight.ndim == 2 and "." in name:
            scale = _scale(name, weight.shape[1], config)
            weight = mx.random.normal(weight.shape, dtype=dtype, scale=scale)
        fresh[name] = weight.astype(dtype)
        # One at a time, as large models would not fit twice.
        mx.eval(fresh[name])
    return fresh


def _scale(name: str, inputs: int, config: Mapping[str, Any]) -> float:
    part = name.split(".")[-2]
    if config["model_type"] != "t5":
        return 0.02 if "embed" in name or part == "shared" else inputs**-0.5
    if part == "shared":
        return 0.05
    return (inputs * config["d_kv"]) ** -0.5 if part == "q" else inputs**-0.5


def words(vocab_size: int) -> list[str]:
    """Return the tokens, which are words but for the special ones."""
    return [*SPECIALS, *(f"t{number}" for number in range(len(SPECIALS), vocab_size))]


def _save_tokenizer(vocab_size: int, folder: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(words(vocab_size))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, vocabulary[EOS])]
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make an encoder-decoder of random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="t5-small")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_seq2seq(arguments.folder, arguments.shape, arguments.seed))


if __name__ == "__main__":
    main()
