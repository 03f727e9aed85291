"""Errors cross from the engine's process to the one that answers."""

from __future__ import annotations

import pickle

import pytest

from mlx_parallm.types.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelLoadingError,
    ModelNotFoundError,
    OverloadedError,
    ParallmError,
    StepError,
)

ERRORS = [
    ContextLengthError(5, "Too long.", param="prompt"),
    InvalidRequestError("no", param="a", code="b"),
    ModelLoadingError("m"),
    ModelNotFoundError("m"),
    OverloadedError("full", retry_after_s=3.0),
    StepError("a step"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_pickled_whole(error: ParallmError) -> None:
    known = pickle.loads(pickle.dumps(error))
    assert type(known) is type(error)
    assert (str(known), known.args, vars(known)) == (str(error), error.args, vars(error))
