"""Has the tests of fake engines run with lives that are dialled, too."""

from __future__ import annotations

import pytest

from tests.dialled_lives import DialledLife
from tests.fleet_harness import FakeFleet

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
