"""Writes the vectors of sentence-transformers for ``scripts/check_encoder.py``; needs torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from sentence_transformers import (  # pyright: ignore[reportMissingImports]
    SentenceTransformer,
)


def main() -> None:
    """Arguments: the model's folder, a JSON list of texts, the file to write."""
    folder, given, taken = sys.argv[1:]
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"torch_dtype": "float32"})
    texts = json.loads(Path(given).read_text(encoding="utf-8"))
    np.save(taken, model.encode(texts, prompt="", batch_size=16).astype(np.float32))


if __name__ == "__main__":
    main()
