"""Has the tests of fake engines run with lives that are dialled, too, and a fleet of two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dialled_lives import DialledLife
from tests.fleet_harness import FakeFleet
from tests.unit.engine.parallel.dying_fleets import end

KINDS = ["direct", pytest.param("dialled", marks=pytest.mark.slow)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the tests of modules that use ``FakeFleet``."""
    if hasattr(metafunc.module, "FakeFleet"):
        metafunc.fixturenames.insert(0, "kind_of_lives")
        metafunc.parametrize("kind_of_lives", KINDS, indirect=True)


@pytest.fixture
def kind_of_lives(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fleets have lives of a kind."""
    if request.param == "dialled":
        monkeypatch.setattr(FakeFleet, "make_life", staticmethod(DialledLife))


@pytest.fixture
def two() -> Iterator[FakeFleet]:
    """Yield a fleet of two engines, which no request may outlast."""
    fleet = FakeFleet(2)
    try:
        yield fleet
        assert not fleet.ended.is_set()
        assert not fleet.router.placements
        assert not fleet.dispatcher._open
        assert not fleet.dispatcher._parts
        assert not fleet.dispatcher._suspects.waiting
    finally:
        end(fleet)
