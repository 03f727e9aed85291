"""A writer of transformers' results for the rules of speech models: tests/golden/speech.json.

Run it by hand, in an environment of its own that has torch:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors numpy
    /tmp/golden/bin/python -m scripts.golden_speech

``timestamps`` has the tokens that may follow others, by logits of a seed; ``segments`` where the
output of a window is cut, and by how many frames the next window is later; ``ratios`` how well
tokens are compressed.
"""

from __future__ import annotations

import json
import random
import tempfile
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from tests.golden_sources import golden_samples
from tests.golden_weights import golden_weight

FILE = Path(__file__).parent.parent / "tests" / "golden" / "speech.json"
#: ``END``, ``OFF``, ``BEGIN``, ``SIZE``: the end token, that without timestamps, the timestamp 0,
#: and the vocabulary's size, in the order of Whisper's tokenizers.
END, OFF, BEGIN, SIZE, MAX_INITIAL = 20, 29, 30, 81, 5
NUM_TIMESTAMPS, NUM_SEGMENTS = 120, 120
NUM_MELS = 80
#: ``SPEECH_CONFIG``, ``GENERATION``: a tiny model with windows of 30 s, and its special tokens.
SPEECH_CONFIG: dict[str, Any] = {
    "vocab_size": BEGIN + 1501,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 1500,
    "max_target_positions": 64,
    "decoder_start_token_id": END + 1,
    "pad_token_id": END,
    "eos_token_id": END,
    "bos_token_id": END,
    "begin_suppress_tokens": None,
}
GENERATION: dict[str, Any] = {
    "decoder_start_token_id": END + 1,
    "eos_token_id": END,
    "pad_token_id": END,
    "bos_token_id": END,
    "lang_to_id": {"<|en|>": END + 2, "<|de|>": END + 3, "<|fr|>": END + 4},
    "task_to_id": {"transcribe": END + 5, "translate": END + 6},
    "is_multilingual": True,
    "no_timestamps_token_id": OFF,
    "prev_sot_token_id": END + 7,
    "suppress_tokens": [3, END + 1, END + 5, END + 6, END + 7, OFF - 1],
    "begin_suppress_tokens": [5, END],
    "max_initial_timestamp_index": 50,
    "max_length": 64,
}
#: ``LONG``: seeds and seconds of recordings, and the probability above which nobody speaks.
LONG = ((1, 30.01, 0.6), (2, 90.0, 0.6), (3, 47.77, 0.6), (4, 61.5, 3e-4), (5, 90.0, 1e-4))


def main() -> None:
    """Write the file."""
    draw = random.Random(1)
    content = {
        "ids": {"end": END, "off": OFF, "begin": BEGIN, "size": SIZE, "max_initial": MAX_INITIAL},
        "timestamps": [timestamps(draw, seed) for seed in range(NUM_TIMESTAMPS)],
        "segments": [segments(draw) for _ in range(NUM_SEGMENTS)],
        "ratios": [ratio(draw) for _ in range(20)],
        "long": long_forms(),
    }
    rows = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def output(draw: random.Random, length: int) -> list[int]:
    """Return texts between pairs of timestamps that grow, as models write them, or parts of it."""
    tokens: list[int] = []
    stamp = BEGIN + draw.randrange(4)
    while len(tokens) < length:
        tokens.append(min(stamp, SIZE - 1))
        tokens += [draw.randrange(END) for _ in range(draw.randrange(1, 5))]
        stamp += draw.randrange(1, 8)
        tokens.append(min(stamp, SIZE - 1))
    return tokens[: length if draw.random() < 0.7 else None]


def timestamps(draw: random.Random, seed: int) -> dict[str, Any]:
    """Return which tokens may follow an output, as ranges, where logits depend on a seed."""
    tokens = output(draw, draw.randrange(9)) if seed else []
    # A shift decides whether timestamps are together likelier than any text.
    shift = draw.choice([-8.0, -2.0, 0.0, 2.0])
    logits = np.random.RandomState(seed).standard_normal(SIZE).astype(np.float32)
    logits[BEGIN:] += np.float32(shift)
    config: Any = SimpleNamespace(
        no_timestamps_token_id=OFF,
        eos_token_id=END,
        bos_token_id=END,
        max_initial_timestamp_index=MAX_INITIAL,
        _detect_timestamp_from_logprob=True,
    )
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=1)
    scores = processor(torch.tensor([[END + 1, *tokens]]), torch.tensor(logits[None]))
    allowed = torch.isfinite(scores[0]).nonzero().flatten().tolist()
    return {"seed": seed, "shift": shift, "tokens": tokens, "allowed": ranges(allowed)}


def ranges(numbers: list[int]) -> list[list[int]]:
    """Return ascending numbers as pairs of a first and a last one."""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    lists = [[number for _, number in run] for _, run in runs]
    return [[run[0], run[-1]] for run in lists]


def segments(draw: random.Random) -> dict[str, Any]:
    """Return the segments of an output, and where the next window begins."""
    tokens = output(draw, draw.randrange(1, 16))
    if draw.random() < 0.1:
        tokens = [draw.randrange(END) for _ in range(3)]
    frames, first = draw.choice([3000, 1234, 2, 51]), draw.choice([0, 3000, 4242])
    made, offset = WhisperGenerationMixin._retrieve_segment(
        seek_sequence=torch.tensor(tokens),
        seek_outputs=[{}],
        time_offset=torch.tensor([first * 0.02 / 2], dtype=torch.float64),
        timestamp_begin=BEGIN,
        seek_num_frames=torch.tensor([frames]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros((1, 1)),
    )
    return {
        "tokens": tokens,
        "first": first,
        "frames": frames,
        "offset": int(offset),
        "segments": [
            [round(float(each["start"]), 6), round(float(each["end"]), 6), each["tokens"].tolist()]
            for each in made
        ],
    }


def ratio(draw: random.Random) -> dict[str, Any]:
    """Return how well tokens are compressed."""
    words = [draw.randrange(50000) for _ in range(draw.choice([1, 3, 40]))]
    tokens = [draw.choice(words) for _ in range(draw.randrange(1, 60))]
    size = draw.choice([64, 256, 51865])
    tokens = [token % size for token in tokens]
    value = WhisperGenerationMixin._retrieve_compression_ratio(torch.tensor(tokens), size)
    return {"tokens": tokens, "size": size, "ratio": value}


def long_forms() -> dict[str, Any]:
    """Return the segments of recordings, by a tiny model in float64."""
    fields = {**SPEECH_CONFIG, "num_mel_bins": NUM_MELS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model: Any = transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(**fields)
        )
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        with safe_open(folder / "model.safetensors", "np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in sorted(file.keys())}
        weights = {key: np.asarray(golden_weight(key, shape)) for key, shape in shapes.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        model = transformers.WhisperForConditionalGeneration.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
    model = model.double().eval()
    model.generation_config = transformers.GenerationConfig(**GENERATION)
    return {
        "config": {key: value for key, value in config.items() if value is not None},
        "generation": GENERATION,
        "weights": shapes,
        "cases": [long_form(model, *case) for case in LONG],
    }


def long_form(model: Any, seed: int, seconds: float, no_speech: float) -> dict[str, Any]:
    """Return language and segments of a recording of a seed."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=NUM_MELS)
    settings: dict[str, Any] = {"truncation": False, "padding": "longest"}
    samples = golden_samples(seed, seconds)
    read = extractor(samples, sampling_rate=16000, return_tensors="np", **settings)
    features = torch.tensor(read.input_features, dtype=torch.float64)
    with torch.no_grad():
        language = model.detect_language(features, generation_config=model.generation_config)
        made = model.generate(
            features,
            task="transcribe",
            return_timestamps=True,
            return_segments=True,
            temperature=(0.0,),
            compression_ratio_threshold=1.35,
            logprob_threshold=-1.0,
            no_speech_threshold=no_speech,
        )
    return {
        "seed": seed,
        "seconds": seconds,
        "no_speech": no_speech,
        "language": int(language[0]),
        "segments": [
            [round(float(each["start"]), 6), round(float(each["end"]), 6), each["tokens"].tolist()]
            for each in made["segments"][0]
        ],
    }


if __name__ == "__main__":
    main()
