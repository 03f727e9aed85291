"""Which interpreter runs the server, and which are refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from mlx_parallm.art import ServerConfig, ServerStartError
from mlx_parallm.art.config import Devices
from mlx_parallm.art.interpreter import PROJECT_PYTHON, PYTHON_VARIABLE, server_python
from mlx_parallm.art.serving import Address, ServedPolicy

BARE = "has no mlx_parallm and no mlx.core"


def link(path: Path, flags: str = "", variables: Mapping[str, object] | None = None) -> str:
    """Write a command that is this interpreter; ``-I -S`` is one without any package."""
    path.parent.mkdir(parents=True, exist_ok=True)
    assignments = " ".join(f"{name}={value}" for name, value in (variables or {}).items())
    path.write_text(f'#!/bin/sh\n{assignments} exec {sys.executable} {flags} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_the_places_of_the_interpreter_are_asked_in_their_order(tmp_path: Path) -> None:
    configured, named = link(tmp_path / "configured"), link(tmp_path / "named")
    variables = {PYTHON_VARIABLE: named}
    assert server_python(None, {}, tmp_path) == sys.executable
    beside = link(tmp_path / PROJECT_PYTHON)
    assert server_python(None, {}, tmp_path) == beside
    assert server_python(None, variables, tmp_path) == named
    assert server_python(configured, variables, tmp_path) == configured


@pytest.mark.parametrize("place", ["python", "variable", "project"])
def test_an_interpreter_without_the_packages_is_refused_by_name(tmp_path: Path, place: str) -> None:
    bare = link(tmp_path / PROJECT_PYTHON if place == "project" else tmp_path / "bare", "-I -S")
    variables = {PYTHON_VARIABLE: bare} if place == "variable" else {}
    with pytest.raises(ServerStartError, match=BARE) as refusal:
        server_python(bare if place == "python" else None, variables, tmp_path)
    assert bare in str(refusal.value)
    assert PYTHON_VARIABLE in str(refusal.value)


def test_an_interpreter_without_mlx_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mlx_parallm").mkdir()
    art = link(tmp_path / "art", "-S", {"PYTHONPATH": tmp_path})
    with pytest.raises(ServerStartError, match=r"has no mlx\.core\."):
        server_python(art, {}, tmp_path)


def test_what_is_no_interpreter_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="/none/python"):
        server_python("/none/python", {}, tmp_path)
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(ServerStartError, match=r"broken .* ended with 3\. no such library"):
        server_python(str(script), {}, tmp_path)


async def test_a_server_does_not_start_without_its_packages(tmp_path: Path) -> None:
    config = ServerConfig(python=link(tmp_path / "bare", "-I -S"))
    policy = ServedPolicy("p", "m", tmp_path, config, Devices((0,), (0,)))
    with pytest.raises(ServerStartError, match=BARE):
        await policy.start(Address())
    await policy.stop()
