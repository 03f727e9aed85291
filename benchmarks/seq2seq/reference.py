"""Time CTranslate2 with a T5 of ``benchmarks.make_seq2seq``.

Run by ``benchmarks.seq2seq`` with a Python that has ctranslate2 and NumPy, and nothing else of this
project's. The model is converted by CTranslate2's own description of Transformers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {"F32": np.float32}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("job", type=Path, help="JSON: sources, max_tokens, threads, alone")
    args = parser.parse_args()
    job = json.loads(args.job.read_text())
    with tempfile.TemporaryDirectory() as folder:
        convert(args.model, Path(folder) / "model")
        print(json.dumps(measure(Path(folder) / "model", args.model, job)))


def measure(converted: Path, model: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Return seconds and tokens of the batch, and of sources one after the other."""
    ctranslate2: Any = import_module("ctranslate2")
    vocabulary = vocabulary_of(model)
    translator = ctranslate2.Translator(
        str(converted), device="cpu", intra_threads=job["threads"], inter_threads=1
    )
    count = job["max_tokens"]

    def run(sources: Sequence[Sequence[int]]) -> tuple[dict[str, float], list[list[int]]]:
        words = [[vocabulary[token] for token in source] for source in sources]
        started, busy = time.perf_counter(), time.process_time()
        results = []
        for part in [words] if len(words) > 1 else [[each] for each in words]:
            results += translator.translate_batch(
                part,
                beam_size=1,
                min_decoding_length=count,
                max_decoding_length=count,
                disable_unk=False,
            )
        spent = {
            "wall_s": time.perf_counter() - started,
            "cpu_s": time.process_time() - busy,
            "tokens": sum(len(each.hypotheses[0]) for each in results),
        }
        places = {word: number for number, word in enumerate(vocabulary)}
        return spent, [[places[word] for word in each.hypotheses[0]] for each in results]

    run(job["sources"][:1])
    batch, tokens = run(job["sources"])
    singles = [run([source]) for source in job["sources"][: job["alone"]]]
    alone = {name: sum(spent[name] for spent, _ in singles) for name in batch}
    return {
        "version": ctranslate2.__version__,
        "batch": batch,
        "alone": alone,
        "tokens": tokens,
    }


def vocabulary_of(model: Path) -> list[str]:
    """Return the words of a folder's tokenizer, by id."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(vocabulary, key=vocabulary.__getitem__)


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Return the float32 arrays of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    weights = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            array = np.frombuffer(data[begin:end], NAMES[entry["dtype"]])
            weights[name] = array.reshape(entry["shape"])
    return weights


def convert(model: Path, output: Path) -> None:
    """Write a T5 with ReLU in CTranslate2's form, in float32."""
    specs: Any = import_module("ctranslate2.specs")
    config = json.loads((model / "config.json").read_text())
    weights = read_weights(model / "model.safetensors")
    spec = specs.TransformerSpec.from_config(
        (config["num_layers"], config["num_decoder_layers"]),
        config["num_heads"],
        relative_attention_bias=True,
        rms_norm=True,
    )
    table = weights["shared.weight"]
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = table
    spec.decoder.projection.weight = table
    spec.decoder.scale_outputs = np.float32(config["d_model"] ** -0.5)
    for name, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        stack.scale_embeddings = False
        stack.layer_norm.gamma = weights[f"{name}.final_layer_norm.weight"]
        for number, layer in enumerate(stack.layer):
            prefix = f"{name}.block.{number}.layer."
            _fill_layer(layer, weights, name, prefix, config)
    vocabulary = vocabulary_of(model)
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.bos_token = spec.config.decoder_start_token = vocabulary[0]
    spec.config.eos_token, spec.config.unk_token = vocabulary[1], vocabulary[2]
    spec.validate()
    spec.optimize(quantization="float32")
    output.mkdir(parents=True, exist_ok=True)
    spec.save(str(output))


def _fill_layer(
    layer: Any, weights: dict[str, np.ndarray], stack: str, prefix: str, config: dict[str, Any]
) -> None:
    own, name = layer.self_attention, f"{prefix}0.SelfAttention."
    own.queries_scale = 1.0
    own.layer_norm.gamma = weights[f"{prefix}0.layer_norm.weight"]
    own.linear[0].weight = np.concatenate([weights[f"{name}{part}.weight"] for part in "qkv"])
    own.linear[1].weight = weights[f"{name}o.weight"]
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    own.relative_attention_bias = weights[bias]
    own.relative_attention_max_distance = np.int32(config["relative_attention_max_distance"])
    last = 1
    if stack == "decoder":
        last, cross, name = 2, layer.attention, f"{prefix}1.EncDecAttention."
        cross.queries_scale = 1.0
        cross.layer_norm.gamma = weights[f"{prefix}1.layer_norm.weight"]
        cross.linear[0].weight = weights[f"{name}q.weight"]
        cross.linear[1].weight = np.concatenate([weights[f"{name}{part}.weight"] for part in "kv"])
        cross.linear[2].weight = weights[f"{name}o.weight"]
    layer.ffn.layer_norm.gamma = weights[f"{prefix}{last}.layer_norm.weight"]
    for number, part in enumerate(("wi", "wo")):
        linear = getattr(layer.ffn, f"linear_{number}")
        linear.weight = weights[f"{prefix}{last}.DenseReluDense.{part}.weight"]


if __name__ == "__main__":
    main()
