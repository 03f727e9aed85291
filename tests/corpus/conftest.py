"""The clock of chat templates, which goes on whenever it is read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ticking_clock import let_time_pass


@pytest.fixture(scope="session", autouse=True)
def time_passes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        let_time_pass(patch)
        yield
