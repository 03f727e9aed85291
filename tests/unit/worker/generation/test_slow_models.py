"""A load logs what makes its model slow, by the model's name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.worker.generation.load.path_choice import PathChoice
from mlx_parallm.worker.generation.load.runner import warn_of_slow
from mlx_parallm.worker.generation.row_selection import RowSelector
from mlx_parallm.worker.weights.loader import LoadedModel

LOADED = LoadedModel(None, {}, Path("models/mine"), "float32", 0)
NO_HEAD = "mine computes the logits of all tokens: no module is its LM head"
ALONE = "mine computes one sequence at a time"


@pytest.mark.parametrize(
    ("path", "is_found", "message"),
    [
        ("packed", True, None),
        ("split", True, None),
        ("packed", False, NO_HEAD),
        ("split", False, NO_HEAD),
        # Their heads select nothing.
        ("sequential", False, ALONE),
        ("alone", False, ALONE),
    ],
)
def test_what_makes_a_model_slow_is_logged(
    path: str, is_found: bool, message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    selector, named = RowSelector(), SimpleNamespace(name=path)
    selector.head = 0 if is_found else selector.head
    of_path: Any = named
    warn_of_slow(LOADED, PathChoice(of_path, path, selector=selector))
    assert caplog.messages == ([] if message is None else [message])
