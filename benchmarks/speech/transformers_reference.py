"""Transcribe clips with transformers' ``generate`` and print times and tokens as JSON.

Run by ``benchmarks.speech`` with an interpreter that has torch and transformers: all clips are one
batch, as long as each other, with the same number of new tokens. Arrays of features are copied to
the device within the time, as on this side.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    folder, file = Path(sys.argv[1]), Path(sys.argv[2])
    job: dict[str, Any] = json.loads(file.read_text())
    torch, transformers = import_module("torch"), import_module("transformers")
    config = json.loads((folder / "config.json").read_text())
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=getattr(torch, config["torch_dtype"]), attn_implementation="sdpa"
    )
    model = model.to(device).eval()
    # [clips, mels, frames], float32 as the extractor gives them.
    features = np.load(job["features"]).swapaxes(1, 2).copy()
    count = job["max_tokens"]

    def run(part: np.ndarray) -> tuple[dict[str, float], list[list[int]]]:
        started, busy = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            tokens = model.generate(
                torch.from_numpy(part).to(device, model.dtype),
                language="en",
                task="transcribe",
                max_new_tokens=count,
                do_sample=False,
                num_beams=1,
            )
        rows = tokens.cpu().tolist()
        spent = {
            "wall_s": time.perf_counter() - started,
            "cpu_s": time.process_time() - busy,
            "tokens": len(rows) * count,
            "clips": len(rows),
        }
        return spent, [row[-count:] for row in rows]

    for _ in range(2):
        run(features)
    rounds: list[dict[str, Any]] = []
    tokens: list[list[int]] = []
    for _ in range(job["rounds"]):
        batch, tokens = run(features)
        singles = [run(features[place : place + 1])[0] for place in range(job["alone"])]
        alone = {name: sum(spent[name] for spent in singles) for name in batch} if singles else {}
        rounds.append({"batch": batch, "alone": alone})
    print(json.dumps({"version": transformers.__version__, "rounds": rounds, "tokens": tokens}))


if __name__ == "__main__":
    main()
