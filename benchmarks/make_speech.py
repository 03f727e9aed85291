"""Make a Whisper of random weights, with a tokenizer of one token for each word.

``python -m benchmarks.make_speech FOLDER --shape tiny``. Equal seeds give equal files. The end
token is suppressed, so that a window's output always has as many tokens as it may.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.make_seq2seq import random_weights
from mlx_parallm.models.seq2seq.whisper import ModelArgs, sinusoids
from mlx_parallm.tokenizer.speech.languages import LANGUAGE_NAMES
from mlx_parallm.worker.weights.loader import DTYPES

END, START = "<|endoftext|>", "<|startoftranscript|>"
TASKS = ("<|translate|>", "<|transcribe|>")
CONTROLS = ("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
#: ``NUM_WORDS``: tokens before the end token; ``NUM_TIMESTAMPS``: those of times, the last ones.
NUM_WORDS, NUM_TIMESTAMPS = 50257, 1501
#: ``BLANK``: the token of a space in OpenAI's vocabulary, which is not chosen first.
BLANK = 220
WHISPER: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "activation_function": "gelu",
    "scale_embedding": False,
    "tie_word_embeddings": True,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "bos_token_id": NUM_WORDS,
    "eos_token_id": NUM_WORDS,
    "pad_token_id": NUM_WORDS,
    "decoder_start_token_id": NUM_WORDS + 1,
}


def _whisper(width: int, layers: int, heads: int, languages: int, **more: Any) -> dict[str, Any]:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", layers), ("ffn_dim", 4 * width), ("attention_heads", heads))
    }
    specials = 2 + languages + len(TASKS) + len(CONTROLS)
    size = NUM_WORDS + specials + NUM_TIMESTAMPS
    return WHISPER | sides | {"d_model": width, "vocab_size": size, "num_mel_bins": 80} | more


#: ``SHAPES``: the shapes of checkpoints, and a tiny one for a trial.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _whisper(384, 4, 6, 99, torch_dtype="float32"),
    "large-v3": _whisper(1280, 32, 20, 100, num_mel_bins=128, torch_dtype="float16"),
    "shrunk": _whisper(64, 2, 4, 99, torch_dtype="float32"),
}


def make_speech(folder: Path, shape: str, seed: int = 0) -> Path:
    """Write a model of a shape to ``folder`` in Hugging Face's form, unless it is there already."""
    config = SHAPES[shape]
    stamp = folder / "made.json"
    made = json.dumps({"seed": seed} | config)
    if stamp.exists() and stamp.read_text() == made:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    words = vocabulary(config["vocab_size"])
    _save_tokenizer(words, folder)
    weights = speech_weights(config, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = generation_config(config, words)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    stamp.write_text(made)
    return folder


def speech_weights(config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    """Return random weights in Hugging Face's layout, with the encoder's sinusoids."""
    weights = random_weights(config, seed)
    args = ModelArgs.from_dict(config)
    table = mx.array(sinusoids(args)).astype(DTYPES[config["torch_dtype"]])
    weights["model.encoder.embed_positions.weight"] = table
    for name, weight in weights.items():
        if weight.ndim == 3:
            # Hugging Face's kernels have the channels before the frames.
            weights[name] = mx.contiguous(weight.swapaxes(1, 2))
    return weights


def vocabulary(size: int) -> list[str]:
    """Return the tokens of a vocabulary of OpenAI's order, by id."""
    words = [f"t{number}" for number in range(NUM_WORDS)]
    num_languages = size - NUM_WORDS - 2 - len(TASKS) - len(CONTROLS) - NUM_TIMESTAMPS
    # English is the first language of OpenAI's vocabulary; the order of others means nothing here.
    codes = ["en", *(code for code in LANGUAGE_NAMES if code != "en")][:num_languages]
    languages = [f"<|{code}|>" for code in codes]
    times = [f"<|{step / 50:.2f}|>" for step in range(NUM_TIMESTAMPS)]
    return [*words, END, START, *languages, *TASKS, *CONTROLS, *times]


def generation_config(config: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """Return the rules of output: the end and all control tokens are suppressed."""
    ids = {word: number for number, word in enumerate(words) if number >= NUM_WORDS}
    languages = {word: ids[word] for word in words[NUM_WORDS + 2 : ids[TASKS[0]]]}
    suppressed = [END, START, *TASKS, *CONTROLS]
    return {
        "decoder_start_token_id": config["decoder_start_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "is_multilingual": True,
        "lang_to_id": languages,
        "task_to_id": {task.strip("<|>"): ids[task] for task in TASKS},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "suppress_tokens": sorted(ids[word] for word in suppressed if word != "<|notimestamps|>"),
        "begin_suppress_tokens": [BLANK, config["eos_token_id"]],
        "max_initial_timestamp_index": 50,
        "max_length": config["max_target_positions"],
    }


def _save_tokenizer(words: list[str], folder: Path) -> None:
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace()])
    tokenizer.add_special_tokens(words[NUM_WORDS : len(words) - NUM_TIMESTAMPS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "unk_token": END,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a Whisper of random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_speech(arguments.folder, arguments.shape, arguments.seed))


if __name__ == "__main__":
    main()
