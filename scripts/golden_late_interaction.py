"""A writer of MaxSim scores of sentence-transformers: tests/golden/late_interaction.json.

Run it by hand, in an environment of its own:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 sentence-transformers==6.2.0 numpy
    /tmp/golden/bin/python -m scripts.golden_late_interaction

Models and tokenizers are those of the tests, in the three forms that its
``MultiVectorEncoder`` reads.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from sentence_transformers import MultiVectorEncoder  # pyright: ignore[reportMissingImports]

from tests.sentence_folders import WRITERS

FILE = Path(__file__).parent.parent / "tests" / "golden" / "late_interaction.json"
QUERIES = ["w40", "w10, w11 w12 w13 .", "w20 w21 w33 w22 w23 w24 w25"]
DOCUMENTS = [
    "w10 w11, w12. w13",
    "w44",
    "w60 w20 w61 . w33 w20, w98 w50 w51 w52 w53 w54",
    ", .",
]


def main() -> None:
    """Write the file."""
    scores = {}
    for name, write in WRITERS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = MultiVectorEncoder(str(write(Path(folder))), device="cpu")
            queries = model.encode_query(QUERIES)
            similarities = model.similarity(queries, model.encode_document(DOCUMENTS))
            scores[name] = [[round(value, 6) for value in row] for row in similarities.tolist()]
    golden = {"queries": QUERIES, "documents": DOCUMENTS, "scores": scores}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items())
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
