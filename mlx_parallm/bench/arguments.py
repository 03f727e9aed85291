"""Types of the flags of ``mlx_parallm bench``; argparse adds the flag to their messages."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.bench.images import MAX_SIDE, ImageSize
from mlx_parallm.bench.workload import Lengths


class FlagGroup(Protocol):
    """The part of a parser, or of a group of its flags, that flags are added to."""

    def add_argument(self, *flags: str, **options: Any) -> argparse.Action:
        """Add a flag."""
        ...


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text!r}")
    return number


def not_negative(text: str) -> int:
    """Return a whole number of at least 0."""
    number = _whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text!r}")
    return number


def positive_number(text: str) -> float:
    """Return a finite number above 0."""
    number = _finite(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text!r}")
    return number


def not_negative_number(text: str) -> float:
    """Return a finite number of at least 0."""
    number = _finite(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text!r}")
    return number


def lengths(text: str) -> Lengths:
    """Return a distribution of lengths; see ``Lengths.parse``."""
    try:
        return Lengths.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be N, uniform:LOW,HIGH or lognormal:MEDIAN,P99 of whole numbers from 1, "
            f"not {text!r}"
        ) from None


def image_size(text: str) -> ImageSize:
    """Return the size of images; see ``ImageSize.parse``."""
    try:
        return ImageSize.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be WIDTHxHEIGHT, each from 1 to {MAX_SIDE}, not {text!r}"
        ) from None


def header(text: str) -> tuple[str, str]:
    """Return the name and the value of a header, written as NAME=VALUE."""
    name, mark, value = text.partition("=")
    if not (mark and name and text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    return name, value


def output_file(text: str) -> Path:
    """Return the path of a file after checking that it can be written."""
    path = Path(text)
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as problem:
        raise argparse.ArgumentTypeError(f"{text}: {problem.strerror}") from None
    return path


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}")
    return number
