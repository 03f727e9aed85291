"""Without a compiler the checks are skipped, but not in CI."""

from __future__ import annotations

import pytest

from tests.kernels import shim_compile


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim_compile.shutil, "which", lambda _: None)


def test_skipped_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        shim_compile.require_compiler()


def test_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception):
        shim_compile.require_compiler()
