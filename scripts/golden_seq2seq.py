"""A writer of transformers' results for tiny encoder-decoders: tests/golden/seq2seq.

Run it by hand, in an environment of its own that has torch:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors numpy
    /tmp/golden/bin/python -m scripts.golden_seq2seq [--only part-of-a-name]

A file holds ``config.json``, names and shapes of the weights of a folder
(``tests/golden_weights.py`` makes their numbers), and for some sources the tokens that greedy
decoding chooses after a decoder prompt, with the logits of the first and the last of them, computed
in float64. Sources are those whose choices rounding cannot change, and that make the model write
several tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers.models.t5.modeling_t5 import T5Attention

from scripts.golden_encoders import lines, numbers
from scripts.golden_seq2seq_cases import SEQ2SEQ_CASES, Seq2SeqCase
from tests.golden_sources import golden_features, golden_ids
from tests.golden_weights import golden_weight

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "seq2seq"
#: ``LENGTHS``: tokens of a source, and those of the decoder prompt behind its start.
LENGTHS = ((1, 2), (5, 0), (40, 6), (300, 1))
NEW_TOKENS = 64
#: ``BUCKETS``: numbers of buckets and longest distances, of released models and others.
BUCKETS = (
    *((32, 128), (32, 256), (64, 128), (16, 128), (12, 20), (8, 1000), (32, 64), (48, 384)),
    # Here exact logarithms put a distance into another bucket.
    *((9, 128), (18, 128), (10, 160), (20, 160)),
)
FARTHEST = 1100
#: ``MARGIN``: how far the second best logit is from the best at least, in tolerances.
MARGIN = 2.0
#: ``DISTINCT``: different tokens among the new ones that suffice; else the seed counts that makes
#: most of them.
DISTINCT = 4
SEEDS = 12


def main() -> None:
    """Write the files of all cases, or of those whose names contain ``--only``."""
    parser = argparse.ArgumentParser(description="Golden values of encoder-decoders.")
    parser.add_argument("--only", default="", help="a part of the names of the cases to write")
    only = parser.parse_args().only
    FOLDER.mkdir(parents=True, exist_ok=True)
    edges = json.dumps(bucket_edges())
    (FOLDER.parent / "relative_buckets.json").write_text(f"{edges}\n", encoding="utf-8")
    for case in SEQ2SEQ_CASES:
        if only in case.name:
            text = lines(golden_values(case))
            (FOLDER / f"{case.name}.json").write_text(text, encoding="utf-8")
            print(f"{case.name}: {len(text)} bytes")


def bucket_edges() -> list[dict[str, Any]]:
    """Return where the buckets of T5's biases change, for several settings."""
    rows: list[dict[str, Any]] = []
    distances = torch.arange(-FARTHEST, FARTHEST + 1)
    for buckets, farthest in BUCKETS:
        for is_causal in (False, True):
            in_order = T5Attention._relative_position_bucket(
                distances, not is_causal, buckets, farthest
            ).tolist()
            edges = [
                [int(distances[place]), bucket]
                for place, bucket in enumerate(in_order)
                if place == 0 or bucket != in_order[place - 1]
            ]
            rows.append(
                {
                    "relative_attention_num_buckets": buckets,
                    "relative_attention_max_distance": farthest,
                    "is_causal": is_causal,
                    "edges": edges,
                }
            )
    return rows


def golden_values(case: Seq2SeqCase) -> dict[str, Any]:
    """Return config, weights by name and shape, and results of a case.

    Raises:
        ValueError: transformers does not read what was written.
    """
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    kind = (
        transformers.WhisperForConditionalGeneration
        if case.model_type == "whisper"
        else transformers.AutoModelForSeq2SeqLM._model_mapping[type(config)]
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind(config).save_pretrained(folder)
        written = _rewrite_config(folder / "config.json", case)
        shapes = _shapes(folder, case)
        weights = {name: np.asarray(golden_weight(name, shape)) for name, shape in shapes.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        model, report = kind.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        missing = set(report["missing_keys"]) - set(case.omitted)
        if missing or report["unexpected_keys"] or report["mismatched_keys"]:
            raise ValueError(f"transformers read {case.name} with {report}")
    results = list(results_of(model.double().eval(), case))
    return {
        "config": written,
        "weights": shapes,
        "tolerance": case.tolerance,
        "sources": results,
    }


def _rewrite_config(file: Path, case: Seq2SeqCase) -> dict[str, Any]:
    fields = json.loads(file.read_text(encoding="utf-8")) | case.written
    fields = {name: value for name, value in fields.items() if value is not None}
    file.write_text(json.dumps(fields), encoding="utf-8")
    return fields


def _shapes(folder: Path, case: Seq2SeqCase) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    shapes |= {name: shapes[like] for name, like in case.added.items()}
    shapes = {name: shape for name, shape in shapes.items() if name not in case.omitted}
    return {case.renamed.get(name, name): shape for name, shape in sorted(shapes.items())}


def results_of(model: Any, case: Seq2SeqCase) -> Iterator[dict[str, Any]]:
    """Yield what the model makes of a source of each length, with the first seed that will do."""
    for length, more in LENGTHS:
        best: dict[str, Any] | None = None
        for seed in count(1):
            result = _result(model, case, seed, length, more)
            if result is not None and (best is None or _distinct(result) > _distinct(best)):
                best = result
            if best is not None and (seed >= SEEDS or _distinct(best) >= DISTINCT):
                yield best
                break


def _distinct(result: dict[str, Any]) -> int:
    return len(set(result["tokens"]))


def _result(
    model: Any, case: Seq2SeqCase, seed: int, length: int, more: int
) -> dict[str, Any] | None:
    """Return logits and greedy tokens; None if a choice is too close."""
    vocab_size = model.config.vocab_size
    if case.model_type == "whisper":
        length = model.config.max_source_positions
        features = golden_features(seed, length, model.config.num_mel_bins)
        source = torch.tensor(features.T[None], dtype=torch.float64)
    else:
        source = torch.tensor([golden_ids(seed, length, vocab_size)])
    start: Any = model.config.decoder_start_token_id
    chosen = [start, *golden_ids(seed + length, more, vocab_size)]
    prompt = len(chosen)
    first = last = None
    # One that takes its layers from the config has as many as the encoder.
    cache = transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    )
    with torch.no_grad():
        memory = model.get_encoder()(source)
        for _ in range(NEW_TOKENS):
            new = chosen if first is None else chosen[-1:]
            logits = model(
                encoder_outputs=memory,
                decoder_input_ids=torch.tensor([new]),
                past_key_values=cache,
                use_cache=True,
            ).logits[0, -1]
            first = logits if first is None else first
            last = logits
            best, second = logits.topk(2).values
            if best - second < MARGIN * case.tolerance * logits.abs().max():
                return None
            chosen.append(int(logits.argmax()))
    return {
        "seed": seed,
        "length": length,
        "prompt": chosen[:prompt],
        "logits": numbers([first, last]),
        "tokens": chosen[prompt:],
    }


if __name__ == "__main__":
    main()
