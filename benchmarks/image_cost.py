"""Measure what an image costs each family: its tokens, and the CPU time that prepares it.

    python -m benchmarks.image_cost

The settings are those of the published checkpoints' image processors, so no checkpoint is needed.
The table that is printed is the one of docs/vision.md. Times are medians of the CPU time of the
thread, in which a busy machine counts little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from benchmarks.checks import Check, conclude
from mlx_parallm.demo_models.folders import DEMO_FOLDERS
from mlx_parallm.images.families import FAMILIES
from mlx_parallm.images.form import ImageForm
from mlx_parallm.images.processor import ImageProcessor
from mlx_parallm.media.decode import decode_image
from mlx_parallm.media.formats.sniffing import read_file

# SIZES: widths and heights; the last is a photograph of 6 megapixels.
SIZES = ((512, 512), (1024, 768), (3000, 2000))
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
CLIP_336 = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
VISION_336 = {"vision_config": {"image_size": 336, "patch_size": 14}}


class Published(NamedTuple):
    """Parts of a family's published ``config.json`` and ``preprocessor_config.json``."""

    config: dict[str, Any]
    processor: dict[str, Any]


def processor(name: str, **settings: Any) -> dict[str, Any]:
    return {"image_processor_type": f"{name}ImageProcessor", **settings}


MODELS: dict[str, Published] = {
    "Gemma 3": Published(
        {"model_type": "gemma3", "mm_tokens_per_image": 256},
        processor("Gemma3", size={"height": 896, "width": 896}),
    ),
    "Gemma 4": Published(
        {"model_type": "gemma4"},
        processor("Gemma4", patch_size=16, max_soft_tokens=280, pooling_kernel_size=3),
    ),
    "Idefics3": Published(
        {
            "model_type": "idefics3",
            "scale_factor": 2,
            "vision_config": {"image_size": 364, "patch_size": 14},
        },
        processor("Idefics3", size={"longest_edge": 1456}, max_image_size={"longest_edge": 364}),
    ),
    "SmolVLM2 500M": Published(
        {
            "model_type": "smolvlm",
            "scale_factor": 4,
            "vision_config": {"image_size": 512, "patch_size": 16},
        },
        processor("SmolVLM", size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}),
    ),
    "InternVL 3": Published(
        {
            "model_type": "internvl",
            "downsample_ratio": 0.5,
            "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]},
        },
        processor("GotOcr2", size={"height": 448, "width": 448}, min_patches=1, max_patches=12),
    ),
    "LLaVA 1.5": Published({"model_type": "llava", **VISION_336}, processor("CLIP", **CLIP_336)),
    "LLaVA 1.6": Published(
        {"model_type": "llava_next", "image_grid_pinpoints": PINPOINTS, **VISION_336},
        processor("LlavaNext", image_grid_pinpoints=PINPOINTS, **CLIP_336),
    ),
    "Pixtral": Published(
        {"model_type": "llava", "vision_config": {"model_type": "pixtral", "patch_size": 16}},
        processor("Pixtral", size={"longest_edge": 1024}, patch_size={"height": 16, "width": 16}),
    ),
    "Mistral Small 3.1": Published(
        {
            "model_type": "mistral3",
            "spatial_merge_size": 2,
            "vision_config": {"model_type": "pixtral", "patch_size": 14},
        },
        processor("Pixtral", size={"longest_edge": 1540}, patch_size={"height": 14, "width": 14}),
    ),
    "Qwen2-VL, Qwen2.5-VL": Published(
        {"model_type": "qwen2_5_vl", "vision_config": {"spatial_merge_size": 2}},
        processor("Qwen2VL", min_pixels=3136, max_pixels=12845056, patch_size=14, merge_size=2),
    ),
    "Qwen3-VL, Qwen3.5": Published(
        {"model_type": "qwen3_vl", "vision_config": {"spatial_merge_size": 2}},
        processor(
            "Qwen2VL",
            size={"shortest_edge": 65536, "longest_edge": 16777216},
            patch_size=16,
            merge_size=2,
        ),
    ),
}
DEMO = "demo:see"
DECODING = "(decoding a JPEG)"


@dataclass(slots=True)
class Cost:
    """Tokens (None for decoding) and measured times of images of each size."""

    tokens: list[int | None]
    times_s: list[list[float]]

    @property
    def cells(self) -> list[str]:
        tokens = ["" if count is None else f"{count:,}" for count in self.tokens]
        return tokens + [f"{1e3 * statistics.median(times):,.0f}" for times in self.times_s]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    images = [drawn(width, height) for width, height in SIZES]
    files = [encoded(image) for image in images]
    with tempfile.TemporaryDirectory() as folder:
        processors = all_processors(Path(folder))
        names = [*processors, DECODING]
        costs = {name: Cost([None] * len(SIZES), [[] for _ in SIZES]) for name in names}
        # The first round loads libraries. Families take turns, so that all meet the same machine.
        for repetition in range(args.repetitions + 1):
            for place in range(len(SIZES)):
                measure(processors, costs, place, images[place], files[place])
            if not repetition:
                for cost in costs.values():
                    cost.times_s = [[] for _ in SIZES]
    print_table(costs)
    details = {"sizes": SIZES, "costs": {name: cost.cells for name, cost in costs.items()}}
    slowest_s = max(statistics.median(cost.times_s[1]) for cost in costs.values())
    return conclude(
        "image_cost", [Check("the slowest at 1024 x 768, ms", 1e3 * slowest_s)], details
    )


def measure(
    processors: dict[str, ImageProcessor],
    costs: dict[str, Cost],
    place: int,
    image: np.ndarray,
    file: bytes,
) -> None:
    """Decode and prepare an image of one size once by each processor."""
    _, taken_s = timed(lambda: decode_image(read_file(file)))
    costs[DECODING].times_s[place].append(taken_s)
    for name, each in processors.items():
        made, taken_s = timed(partial(each.prepare, image))
        costs[name].tokens[place] = sum(made.written.runs)
        costs[name].times_s[place].append(taken_s)


def all_processors(folder: Path) -> dict[str, ImageProcessor]:
    """Return the processor of each family; its settings are written below ``folder``."""
    made: dict[str, ImageProcessor] = {}
    for number, (name, published) in enumerate(MODELS.items()):
        own = folder / str(number)
        own.mkdir()
        (own / "preprocessor_config.json").write_text(json.dumps(published.processor))
        made[name] = ImageProcessor(form_of(published.config, own))
    demo = DEMO_FOLDERS[DEMO]
    made[DEMO] = ImageProcessor(form_of(json.loads((demo / "config.json").read_text()), demo))
    return made


def form_of(config: dict[str, Any], folder: Path) -> ImageForm:
    """Return a form whose tokenizer does not matter."""
    return ImageForm(
        family=FAMILIES[config["model_type"]](config),
        folder=folder,
        feature_id=0,
        template_reads_parts=True,
        row_bytes=0,
        fingerprint=folder.name,
    )


def drawn(width: int, height: int) -> np.ndarray:
    """Return an image of random squares, smooth enough to be stored like a photograph."""
    source = np.random.default_rng(width)
    small = source.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def encoded(image: np.ndarray) -> bytes:
    file = BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=90)
    return file.getvalue()


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call returns, and the CPU time of this thread that it took."""
    start = time.thread_time()
    made = call()
    return made, time.thread_time() - start


def print_table(costs: dict[str, Cost]) -> None:
    sizes = [f"{width} x {height}" for width, height in SIZES]
    print_row(["model", *(f"tokens, {size}" for size in sizes), *(f"ms, {size}" for size in sizes)])
    print_row(["---"] * (1 + 2 * len(sizes)))
    for name, cost in costs.items():
        print_row([name, *cost.cells])


def print_row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    raise SystemExit(main())
