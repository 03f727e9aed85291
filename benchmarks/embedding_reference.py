"""Encodes texts by sentence-transformers. Runs in a Python that has it, and imports nothing else.

``PYTHON benchmarks/embedding_reference.py FOLDER TEXTS.json VECTORS.npy cpu|cuda`` prints the
texts per second of each batch size as JSON. Some texts are encoded before any are timed.
"""

import json
import sys
import time
from pathlib import Path

try:
    import numpy as np
    import sentence_transformers  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
except ImportError as problem:
    print(json.dumps({"missing": str(problem)}))
    sys.exit()

BATCH_SIZES = (8, 32, 128)


def main() -> None:
    folder, texts_file, vectors_file, device = sys.argv[1:]
    if device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"missing": f"torch {torch.__version__} has no CUDA here"}))
        return
    texts = json.loads(Path(texts_file).read_text())
    model = sentence_transformers.SentenceTransformer(folder, device=device)
    if device == "cuda":
        model = model.half()
    vectors = model.encode(texts[:64], batch_size=8)
    np.save(vectors_file, vectors.astype(np.float32))
    rates = {}
    for batch_size in BATCH_SIZES:
        begin_s = time.perf_counter()
        model.encode(texts, batch_size=batch_size)
        rates[batch_size] = len(texts) / (time.perf_counter() - begin_s)
    about = {
        "torch": torch.__version__,
        "sentence_transformers": sentence_transformers.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    print(json.dumps({"texts_per_s": rates, **about}))


if __name__ == "__main__":
    main()
