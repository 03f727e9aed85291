"""Embedders that sentence-transformers saved give its vectors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm import LLM

WRITTEN = Path(os.environ["CORPUS_WRITTEN"])
INDEX: dict[str, Any] = json.loads((WRITTEN / "index.json").read_text(encoding="utf-8"))
ATOL = 1e-4


@pytest.mark.parametrize("line", INDEX["embedders"], ids=lambda line: line["folder"])
def test_an_embedder(line: dict[str, Any], record_property: Callable[[str, object], None]) -> None:
    record_property("case", line["model"])
    record_property("outcome", "the same")
    llm = LLM(str(WRITTEN / line["folder"]))
    # The library cuts long texts.
    outputs = llm.embed(INDEX["texts"], truncate_prompt_tokens=-1)
    for output, expected in zip(outputs, line["vectors"], strict=True):
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=ATOL)
