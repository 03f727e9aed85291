"""Transcribe clips with mlx-whisper and print times and tokens as JSON.

Run by ``benchmarks.speech`` with an interpreter that has mlx-whisper, with MLX's matrix products by
the same OpenBLAS as on this side. The weights are those of the folder, renamed. ``decode`` gets all
features of a batch at once, or those of one clip.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

# NAMES: parts of Hugging Face's names of parameters, and mlx-whisper's.
NAMES = {
    "layers": "blocks",
    "self_attn": "attn",
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn": "cross_attn",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "out",
    "fc1": "mlp1",
    "fc2": "mlp2",
    "final_layer_norm": "mlp_ln",
    "embed_tokens": "token_embedding",
}
POSITIONS = "model.encoder.embed_positions.weight"


def main() -> None:
    folder, file = Path(sys.argv[1]), Path(sys.argv[2])
    job: dict[str, Any] = json.loads(file.read_text())
    model, decoding = load(folder), import_module("mlx_whisper.decoding")
    features = mx.array(np.load(job["features"]))
    mx.eval(features)
    generation = json.loads((folder / "generation_config.json").read_text())
    options: dict[str, Any] = {
        "language": "en",
        "temperature": 0.0,
        "sample_len": job["max_tokens"],
        "without_timestamps": True,
        "fp16": False,
    }

    def run(part: mx.array) -> tuple[dict[str, float], list[list[int]]]:
        started, busy = time.perf_counter(), time.process_time()
        # It adds to the list of suppressed tokens.
        own = options | {"suppress_tokens": list(generation["suppress_tokens"])}
        results = model.decode(part, decoding.DecodingOptions(**own))
        spent = {
            "wall_s": time.perf_counter() - started,
            "cpu_s": time.process_time() - busy,
            "tokens": sum(len(each.tokens) for each in results),
            "clips": len(results),
        }
        return spent, [each.tokens for each in results]

    run(features[:1])
    rounds: list[dict[str, Any]] = []
    tokens: list[list[int]] = []
    for _ in range(job["rounds"]):
        batch, tokens = run(features)
        singles = [run(features[place : place + 1])[0] for place in range(job["alone"])]
        alone = {name: sum(spent[name] for spent in singles) for name in batch}
        rounds.append({"batch": batch, "alone": alone})
    version = import_module("mlx_whisper").__version__
    print(json.dumps({"version": version, "rounds": rounds, "tokens": tokens}))


def load(folder: Path) -> Any:
    """Return mlx-whisper's model with the weights of a folder of Hugging Face's form."""
    config = json.loads((folder / "config.json").read_text())
    whisper = import_module("mlx_whisper.whisper")
    dims = whisper.ModelDimensions(
        n_mels=config["num_mel_bins"],
        n_audio_ctx=config["max_source_positions"],
        n_audio_state=config["d_model"],
        n_audio_head=config["encoder_attention_heads"],
        n_audio_layer=config["encoder_layers"],
        n_vocab=config["vocab_size"],
        n_text_ctx=config["max_target_positions"],
        n_text_state=config["d_model"],
        n_text_head=config["decoder_attention_heads"],
        n_text_layer=config["decoder_layers"],
    )
    model = whisper.Whisper(dims, mx.float32)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    # It computes the encoder's sinusoids.
    weights.pop(POSITIONS)
    model.update(tree_unflatten([renamed(name, array) for name, array in weights.items()]))
    mx.eval(model.parameters())
    return model


def renamed(name: str, array: mx.array) -> tuple[str, mx.array]:
    """Return a weight as mlx-whisper names it and lays it out."""
    name = name.removeprefix("model.")
    if array.ndim == 3:
        # MLX's kernels have the frames before the channels.
        array = array.swapaxes(1, 2)
    name = ".".join(NAMES.get(part, part) for part in name.split("."))
    name = name.replace("encoder.layer_norm", "encoder.ln_post")
    name = name.replace("decoder.layer_norm", "decoder.ln")
    name = name.replace("embed_positions.weight", "positional_embedding")
    return name, array


if __name__ == "__main__":
    main()
