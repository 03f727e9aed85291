"""Adapters that PEFT saved give its logits, or are refused and say why."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.adapters.formats import read_adapter_folder
from mlx_parallm.types.errors import InvalidRequestError
from tests.generator_adapters import AdaptedGenerator

WRITTEN = Path(os.environ["CORPUS_WRITTEN"])
INDEX: dict[str, Any] = json.loads((WRITTEN / "index.json").read_text(encoding="utf-8"))
ATOL = 5e-4
#: What an adapter's change is not the product of its factors for, or what is not served.
REFUSED = {
    *("init pissa", "init pissa_niter_4", "init olora", "init loftq", "bias"),
    *("replicated layers", "alora", "trained tokens", "head in full"),
}


@functools.cache
def generator_of(model: str) -> AdaptedGenerator:
    """Return a model of the index; the tests of one follow each other."""
    return AdaptedGenerator(WRITTEN / model)


@pytest.mark.parametrize("line", INDEX["adapters"], ids=lambda line: line["folder"])
def test_an_adapter(line: dict[str, Any], record_property: Callable[[str, object], None]) -> None:
    record_property("case", line["case"])
    generator = generator_of(line["model"])
    if line["case"] in REFUSED:
        record_property("outcome", "refused")
        with pytest.raises(InvalidRequestError):
            generator.place(read_adapter_folder(WRITTEN / line["folder"], param="folder"))
        return
    record_property("outcome", "the same")
    generator.place(read_adapter_folder(WRITTEN / line["folder"], param="folder"))
    logits = generator.last_logits(INDEX["ids"], 1)
    np.testing.assert_allclose(logits, line["logits"], atol=ATOL)
