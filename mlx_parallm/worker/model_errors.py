"""The errors that a model may raise when it is run in a way it was not written for."""

from __future__ import annotations

MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
