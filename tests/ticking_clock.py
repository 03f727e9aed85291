"""A clock for chat templates that goes on whenever it is read."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator

import pytest
from typing_extensions import override

from mlx_parallm import template_time

START = datetime.datetime(2026, 1, 1)
STEP = datetime.timedelta(days=1, seconds=1)


def let_time_pass(
    patch: pytest.MonkeyPatch, times: Iterator[datetime.datetime] | None = None
) -> None:
    """Give all templates such a clock, which goes on by a day and a second, or has these times."""
    read = times or (START + tick * STEP for tick in itertools.count())

    class Clock(datetime.datetime):
        @override
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return next(read)

    patch.setattr(template_time, "datetime", Clock)
