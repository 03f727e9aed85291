"""Golden vision-language models (scripts/golden_vision.py), as folders and as requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.images.families import FAMILIES
from mlx_parallm.images.form import ImageForm
from mlx_parallm.images.processor import ImageProcessor
from mlx_parallm.images.prompt import image_input
from mlx_parallm.types.model_input import ModelInput, Span
from scripts.golden_vision_parts import SPECIALS, golden_image
from tests.encoder_folders import golden_arrays

GOLDEN = Path(__file__).parent / "golden" / "vision"


def vision_names() -> list[str]:
    return sorted(path.stem for path in GOLDEN.glob("*.json"))


def read_vision(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def write_vision(folder: Path, golden: dict[str, Any]) -> Path:
    """Write a golden model with its processor, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden["config"]), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(golden["processor"]))
    mx.save_safetensors(str(folder / "model.safetensors"), golden_arrays(golden), {"format": "pt"})
    return folder


class GoldenImages:
    """The images of a golden model's prompts, as inputs."""

    def __init__(self, golden: dict[str, Any], folder: Path) -> None:
        family = FAMILIES[golden["config"]["model_type"]](golden["config"])
        self.form = ImageForm(
            family=family,
            folder=folder,
            feature_id=SPECIALS.index(family.feature_token),
            template_reads_parts=True,
            row_bytes=4
            * golden["config"]["text_config"]["hidden_size"]
            * (1 + family.num_added_layers),
            fingerprint=folder.name,
        )
        self._processor = ImageProcessor(self.form)
        self._prompts = golden["prompts"]
        self._inputs: dict[tuple[int, int], tuple[ModelInput, ...]] = {}

    def inputs(self, number: int, *, start: int = 0) -> tuple[ModelInput, ...]:
        """Return the images of a prompt whose first token has position ``start``."""
        if (number, start) not in self._inputs:
            self._inputs[number, start] = self._prepared(number, start)
        return self._inputs[number, start]

    def _prepared(self, number: int, start: int) -> tuple[ModelInput, ...]:
        prompt = self._prompts[number]
        runs = _runs([token_id == self.form.feature_id for token_id in prompt["ids"]])
        inputs: list[ModelInput] = []
        for place, (height, width) in enumerate(prompt["sizes"]):
            image = self._processor.prepare(golden_image(10 * number + place, height, width))
            own = [runs.pop(0) for _ in image.written.runs]
            assert tuple(stop - first for first, stop in own) == image.written.runs
            span = Span(start + own[0][0], start + own[-1][1])
            ids = prompt["ids"][own[0][0] : own[-1][1]]
            inputs.append(image_input(image, self.form, span, ids))
        assert not runs
        return tuple(inputs)


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the first place and the end of each run of true flags."""
    edges = np.flatnonzero(np.diff([0, *flags, 0])).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
