"""Compare a real checkpoint that takes images with transformers.

    make check-vision MODEL=folder ARGS="--reference-python PYTHON"

Drawn images of several sizes are described by both in float32, greedily. Tokens must be equal up
to the first place where the two likeliest tokens are nearly tied. The folder is one that
transformers reads too, not one of mlx-community. PYTHON has transformers, torch and Pillow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from benchmarks.checks import Check, conclude
from mlx_parallm import LLM, SamplingParams
from mlx_parallm.images.families import FAMILIES

REFERENCE = Path(__file__).with_name("vision_reference.py")
QUESTION = "What is on this image?"
# SIZES: heights and widths of the images, which take turns.
SIZES = ((224, 224), (300, 500), (480, 200), (64, 640), (768, 1024))
# TIE: two tokens whose log-probabilities differ by less may change places.
TIE = 0.02


class Answer(NamedTuple):
    """One answer of this project.

    Attributes:
        prompt_ids: the prompt, with the feature tokens.
        tokens: what follows.
        margins: by how much each token is likelier than the next one.
    """

    prompt_ids: list[int]
    tokens: list[int]
    margins: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder")
    parser.add_argument("--reference-python", required=True, help="has transformers and torch")
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = [drawn(Path(folder), number) for number in range(args.images)]
        answers = ours(args.model, paths, args.max_tokens)
        expected = theirs(args, paths, answers)
    equal = [is_equal(own, other) for own, other in zip(answers, expected, strict=True)]
    same = sum(own.tokens == other for own, other in zip(answers, expected, strict=True))
    checks = [
        Check("images", len(paths)),
        Check("answers with the same tokens", same),
        Check("answers equal up to near ties", sum(equal), "==", len(paths)),
    ]
    return conclude("check_vision", checks, {"model": str(args.model), "equal": equal})


def drawn(folder: Path, number: int) -> Path:
    """Write an image of rectangles over a slope."""
    height, width = SIZES[number % len(SIZES)]
    draw = np.random.RandomState(number)
    pixels = (
        np.linspace(0, 255, width)[None, :, None] * draw.rand(1, 1, 3) * np.ones((height, 1, 1))
    )
    for _ in range(4):
        top, left = draw.randint(height // 2), draw.randint(width // 2)
        bottom, right = top + draw.randint(8, height // 2), left + draw.randint(8, width // 2)
        pixels[top:bottom, left:right] = draw.randint(0, 256, 3)
    path = folder / f"{number}.png"
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


def ours(model: Path, paths: list[Path], max_tokens: int) -> list[Answer]:
    """Return this project's answers, all in one batch."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
    conversations = [
        [
            {
                "role": "user",
                "content": [{"type": "image", "image": path}, {"type": "text", "text": QUESTION}],
            }
        ]
        for path in paths
    ]
    with LLM(str(model), dtype="float32") as llm:
        outputs = llm.chat(conversations, params)
    answers: list[Answer] = []
    for output in outputs:
        (sample,) = output.outputs
        margins: list[float] = []
        for entry in sample.logprobs:
            (_, first), (_, second) = entry.top[:2]
            margins.append(first - second)
        answers.append(Answer(list(output.prompt_token_ids), sample.token_ids, margins))
    return answers


def theirs(args: Any, paths: list[Path], answers: list[Answer]) -> list[list[int]]:
    """Return transformers' tokens for the same prompts."""
    config = json.loads((args.model / "config.json").read_text())
    options = dict(FAMILIES[config["model_type"]](config).options)
    lines = [
        json.dumps(
            {
                "token_ids": answer.prompt_ids,
                "image": str(path),
                "max_tokens": args.max_tokens,
                "options": options,
            }
        )
        for path, answer in zip(paths, answers, strict=True)
    ]
    command = [args.reference_python, str(REFERENCE), str(args.model)]
    done = subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"The reference failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def is_equal(own: Answer, other: list[int]) -> bool:
    """True if the tokens are equal, or differ first where two were nearly tied."""
    if own.tokens == other:
        return True
    pairs = zip(own.tokens, other, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return same < min(len(own.tokens), len(other)) and own.margins[same] < TIE


if __name__ == "__main__":
    raise SystemExit(main())
