"""Fills masks by transformers' pipeline. Runs in a Python that has it, and imports nothing else.

``PYTHON benchmarks/fill_mask_reference.py FOLDER`` reads lines of JSON, lists of texts. For each it
prints a line: the texts per second of each batch size, and the likeliest token of each text.
"""

import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers

BATCH_SIZES = (1, 8)


def main() -> None:
    transformers.logging.set_verbosity_error()
    pipeline = transformers.pipeline("fill-mask", model=sys.argv[1], dtype=torch.float32)
    about = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        pipeline(texts[:8], batch_size=8)
        rates, answers = {}, []
        for batch_size in BATCH_SIZES:
            begin_s = time.perf_counter()
            answers = pipeline(texts, batch_size=batch_size)
            rates[batch_size] = len(texts) / (time.perf_counter() - begin_s)
        best = [[answer[0]["token"], answer[0]["score"]] for answer in answers]
        print(json.dumps({"texts_per_s": rates, "best": best}), flush=True)


if __name__ == "__main__":
    main()
