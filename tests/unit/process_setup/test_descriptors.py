"""The limit of descriptors is raised, and mlx_lm does not lower it."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from mlx_parallm.process_setup import descriptors
from mlx_parallm.process_setup.descriptors import raise_descriptor_limit

# PRELUDE: sets the limits of a process; SHOW prints them.
PRELUDE = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
SHOW = "\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))"
KEEP = """
from mlx_parallm.process_setup.descriptors import keep_descriptor_limit
keep_descriptor_limit()
keep_descriptor_limit()
"""
HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def limits_after(code: str, soft: int, hard: int) -> tuple[int, ...]:
    """Return both limits after some code ran in a process that began with these."""
    program = PRELUDE.format(soft=soft, hard=hard) + code + SHOW
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return tuple(map(int, result.stdout.split()))


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (256, 20_000, 20_000),
        (1024, 1024, 1024),
        (1024, 65_536, 65_536),
        (1024, 500_000, 65_536),
        (100_000, 500_000, 100_000),
        (1024, resource.RLIM_INFINITY, 65_536),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, expected: int
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(descriptors.sys, "platform", "linux")
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.append(new))
    raise_descriptor_limit()
    assert limits[-1] == (expected, hard)


def test_macos_allows_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, resource.RLIM_INFINITY)]
    monkeypatch.setattr(descriptors.sys, "platform", "darwin")
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.append(new))
    raise_descriptor_limit()
    assert limits[-1] == (10_240, resource.RLIM_INFINITY)


@pytest.mark.parametrize("hard", [1024, pytest.param(min(HARD, 20_000), marks=pytest.mark.slow)])
def test_mlx_lm_changes_no_limit(hard: int) -> None:
    """Its module is otherwise imported as ever, and others may set limits."""
    after = KEEP + (
        "import inspect, sys\n"
        "import mlx_lm.utils\n"
        "assert not [each for each in sys.meta_path if type(each).__name__ == '_Finder']\n"
        "assert 'def load(' in inspect.getsource(mlx_lm.utils)\n"
        "assert type(mlx_lm.utils.__spec__.loader).__name__ == 'SourceFileLoader'\n"
        "assert type(resource.setrlimit).__name__ == 'builtin_function_or_method'\n"
    )
    assert limits_after(after, 1000, hard) == (1000, hard)


def test_what_it_is_kept_from_is_still_there() -> None:
    """Once this fails, mlx_lm lowers no limit any more, and the module can go."""
    assert limits_after("import mlx_lm.utils", 1000, min(HARD, 20_000)) == (2048, 4096)
