"""The part of ``scripts/check_encoder.py`` that runs sentence-transformers; it needs torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from sentence_transformers import (  # pyright: ignore[reportMissingImports]
    SentenceTransformer,
)


def main() -> None:
    """Write vectors; arguments are the model's folder, a JSON list of texts, and the output."""
    folder, texts_file, vectors_file = sys.argv[1:]
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"torch_dtype": "float32"})
    texts = json.loads(Path(texts_file).read_text(encoding="utf-8"))
    np.save(vectors_file, model.encode(texts, prompt="", batch_size=16).astype(np.float32))


if __name__ == "__main__":
    main()
