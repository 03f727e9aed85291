"""Generate about pictures by mlx-vlm, in this process. Needs ``mlx_vlm`` to be importable.

``python -m benchmarks.vision_mlx_vlm FOLDER WIDTHxHEIGHT CLIENTS MAX_TOKENS`` does what mlx-vlm's
server does with requests that arrive together: it decodes and prepares each picture, runs the tower
for it, and gives the prompts to mlx-vlm's ``BatchGenerator``. It prints a line of JSON.
``benchmarks.vision`` calls it; the folder is of ``make_vision_model``.
"""

from __future__ import annotations

import io
import json
import statistics
import sys
import time
from base64 import b64decode
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_vlm.generate.ar import BatchGenerator  # pyright: ignore[reportMissingImports]
from mlx_vlm.utils import get_model_and_args  # pyright: ignore[reportMissingImports]
from PIL import Image
from transformers import AutoImageProcessor

from benchmarks.make_vision_model import SPECIALS, picture_part

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
START, END, PAD = map(SPECIALS.index, MARKS)
# QUESTION: tokens of text behind a picture.
QUESTION = 18
# WARM_UP_TOKENS: of each answer of the first round, which is not measured.
WARM_UP_TOKENS = 8


class NeverStops:
    """Ends no answer before its last token. Stands for a tokenizer's criteria."""

    def add_eos_token_ids(self, ids: Any = None) -> None:
        """Ignore ids."""

    def __call__(self, *_: Any) -> bool:
        """Return False."""
        return False


class NoText:
    """Stands for a tokenizer that is not needed: answers stay ids."""

    stopping_criteria = NeverStops()


class Round(NamedTuple):
    """Figures of clients that come together."""

    tokens_per_s: float
    ttft_p99_ms: float


def main() -> None:
    folder, size, clients, max_tokens = sys.argv[1:]
    width, height = map(int, size.split("x"))
    model = load(Path(folder))
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    rounds: list[Round] = []
    for number, count in enumerate((WARM_UP_TOKENS, int(max_tokens), int(max_tokens))):
        seeds = range(1_000_000 + 1000 * number, 1_000_000 + 1000 * number + int(clients))
        pictures = [picture_part(width, height, seed)["image_url"]["url"] for seed in seeds]
        rounds.append(measure(model, processor, pictures, count))
    best = max(rounds[1:])
    print(json.dumps(best._asdict()))


def load(folder: Path) -> Any:
    """Return mlx-vlm's model of the folder's config, with random weights of its dtype."""
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("image_token_index", config["image_token_id"])
    module, _ = get_model_and_args(config)
    config["vision_config"].setdefault("model_type", config["model_type"])
    config["video_token_id"] = len(SPECIALS)
    parts = {
        "text_config": module.TextConfig.from_dict(config["text_config"]),
        "vision_config": module.VisionConfig.from_dict(config["vision_config"]),
    }
    settings = module.ModelConfig.from_dict(config)
    for name, part in parts.items():
        setattr(settings, name, part)
    mx.random.seed(0)
    model = module.Model(settings)
    model.set_dtype(getattr(mx, config["dtype"]))
    mx.eval(model.parameters())
    return model


def measure(model: Any, processor: Any, pictures: list[str], max_tokens: int) -> Round:
    """Return what requests about these pictures get that arrive at the same time."""
    begin = time.perf_counter()
    generator = BatchGenerator(
        model.language_model, NoText(), compute_logprobs=False, greedy_sampling=True
    )
    for seed, url in enumerate(pictures):
        ids, options = prepared(model, processor, url, seed)
        generator.insert([ids], max_tokens=max_tokens, prompt_kwargs=[options])
    first: dict[int, float] = {}
    total = 0
    while generator.has_work:
        _, responses = generator.next()
        for response in responses:
            first.setdefault(response.uid, time.perf_counter() - begin)
            total += 1
    seconds = time.perf_counter() - begin
    generator.close()
    assert total == len(pictures) * max_tokens, f"{total} tokens came"
    times = [1000 * each for each in first.values()]
    p99 = statistics.quantiles(times, n=100, method="inclusive")[98]
    return Round(total / seconds, p99)


def prepared(model: Any, processor: Any, url: str, seed: int) -> tuple[list[int], dict[str, Any]]:
    """Return a prompt's token ids, and the arguments that mlx-vlm's text model takes for it."""
    picture = Image.open(io.BytesIO(b64decode(url.partition(",")[2]))).convert("RGB")
    arrays = processor(images=[picture], return_tensors="np")
    grid = np.array(arrays["image_grid_thw"])
    num_rows = int(grid.prod()) // processor.merge_size**2
    text = np.random.default_rng(seed).integers(len(SPECIALS) + 1, 4000, QUESTION).tolist()
    ids = [*text[:1], START, *([PAD] * num_rows), END, *text[1:]]
    tokens = mx.array([ids])
    made = model.get_input_embeddings(
        tokens,
        mx.array(np.array(arrays["pixel_values"])),
        mask=mx.ones_like(tokens),
        image_grid_thw=mx.array(grid),
    )
    options = {name: value for name, value in made.to_dict().items() if value is not None}
    mx.eval(options)
    return ids, options


if __name__ == "__main__":
    main()
