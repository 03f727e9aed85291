"""Many large images, one after the other: how much memory does the server keep?

``python -m loadtests.images`` serves the model that sees and asks about 500 different images of
12 megapixels in turn. The exit status is 0 if every answer is right in form, and if the server's
memory grows by no more than its budget for the features of images and 200 MB.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from PIL import Image

from benchmarks.checks import Check, conclude
from benchmarks.servers import SERVED_NAME, Server, mlx_parallm_server
from mlx_parallm.generation.scheduler.running import INPUT_CACHE_BYTES

NUM_IMAGES = 500
# SIZE: width and height of the images.
SIZE = (4000, 3000)
FORMATS = ("jpeg", "png", "webp")
# BLOCK: pixels of a side of the squares that images are made of, so that files are small.
BLOCK = 100
# WARM_UP: small images before memory is measured, which import what processors need.
WARM_UP = 3
# MOST_GROWTH_BYTES: besides the budget of features.
MOST_GROWTH_BYTES = 200e6
TIMEOUT_S = 120.0
SETTLE_S = 2.0
REPORT_EVERY = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo:see")
    parser.add_argument("--images", type=int, default=NUM_IMAGES)
    parser.add_argument("--server-options", default="")
    args = parser.parse_args()
    with mlx_parallm_server(Path(args.model), shlex.split(args.server_options)) as server:
        for number in range(WARM_UP):
            ask(server, image_url(number, (200, 100)))
        before = resident = server.resident_bytes()
        samples, failures, seconds = [before], 0, []
        for number in range(args.images):
            url = image_url(number, SIZE)
            begin_s = time.perf_counter()
            failures += not ask(server, url)
            seconds.append(time.perf_counter() - begin_s)
            if number % REPORT_EVERY == REPORT_EVERY - 1:
                samples.append(server.resident_bytes())
                print(f"{number + 1} images: {samples[-1] / 1e6:.0f} MB", flush=True)
        time.sleep(SETTLE_S)
        resident = server.resident_bytes()
    growth = (resident - before) / 1e6
    checks = [
        Check("images", args.images),
        Check("failures", failures, "==", 0),
        Check("memory before, MB", before / 1e6),
        Check("memory after, MB", resident / 1e6),
        Check("growth, MB", growth, "<=", (INPUT_CACHE_BYTES + MOST_GROWTH_BYTES) / 1e6),
        Check("growth in the second half, MB", (resident - samples[len(samples) // 2]) / 1e6),
        Check("seconds of a request, median", float(np.median(seconds))),
        Check("load average of the machine", os.getloadavg()[0]),
    ]
    return conclude("images", checks, {"model": args.model, "resident_bytes": samples})


def image_url(seed: int, size: tuple[int, int]) -> str:
    """Return an image of coloured squares as a URL; every seed has its own."""
    width, height = size
    random = np.random.RandomState(seed)
    squares = random.randint(0, 256, (-(-height // BLOCK), -(-width // BLOCK), 3), np.uint8)
    pixels = np.kron(squares, np.ones((BLOCK, BLOCK, 1), np.uint8))[:height, :width]
    kind = FORMATS[seed % len(FORMATS)]
    file = io.BytesIO()
    options: dict[str, Any] = {"png": {"compress_level": 1}, "webp": {"method": 0}}.get(kind, {})
    Image.fromarray(pixels).save(file, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def ask(server: Server, url: str) -> bool:
    """Ask about an image; True if the answer counts its tokens."""
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "How many circles are there?"},
    ]
    body = {
        "model": SERVED_NAME,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 4,
    }
    response = httpx2.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
    if response.status_code != 200:
        print(response.text[:300])
        return False
    return bool(response.json()["usage"]["prompt_tokens_details"]["image_tokens"])


if __name__ == "__main__":
    sys.exit(main())
