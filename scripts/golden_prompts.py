"""A writer of vectors of texts with prompts: tests/golden/prompts.json.

Run it by hand, in an environment of its own:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 sentence-transformers==6.2.0 numpy
    /tmp/golden/bin/python -m scripts.golden_prompts

The model is one of the tests.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

from tests.sentence_folders import write_prompted

FILE = Path(__file__).parent.parent / "tests" / "golden" / "prompts.json"
TEXTS = ["w40 w41 w42", "w50", "w60 w61 w62 w63 w64 w65 w66"]


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        model = SentenceTransformer(str(write_prompted(Path(folder))), device="cpu")
        vectors = {
            name: [[round(float(value), 6) for value in row] for row in encoded]
            for name, encoded in (
                ("none", model.encode(TEXTS)),
                ("query", model.encode(TEXTS, prompt_name="query")),
                ("passage", model.encode(TEXTS, prompt_name="passage")),
            )
        }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in vectors.items()]
    text = ",\n".join([f'"texts": {json.dumps(TEXTS)}', *lines])
    FILE.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
