"""The Makefile and ``.ci/run`` on other machines, by fakes of the commands that describe them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from mlx_parallm.cli.doctor.command import REJECTED

ROOT = Path(__file__).resolve().parents[2]
# TOOLS: what the Makefile and the script need besides the fakes.
TOOLS = ("bash", "cat", "cksum", "cp", "dirname", "env", "rm", "touch")
# PYTHON: this interpreter, as if it was another one.
PYTHON = """\
case "$1" in
--version) echo "Python 3.12.1" ;;
-c) exec {real} -c "import platform, sys
platform.machine = lambda: '{machine}'
sys.version_info = {version}
$2" ;;
*) exit 3 ;;
esac
"""


def python(machine: str = "arm64", version: tuple[int, int] = (3, 12)) -> str:
    return PYTHON.format(real=sys.executable, machine=machine, version=version)


def run(
    command: list[str], folder: Path, fakes: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command that finds no commands but fakes, scripts of ``sh``, and ``TOOLS``."""
    commands = folder / "commands"
    commands.mkdir()
    for name in TOOLS:
        (commands / name).symlink_to(shutil.which(name) or pytest.skip(f"there is no {name}"))
    for name, script in fakes.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o700)
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PATH": str(commands)},
    )


def make_venv(
    folder: Path, fakes: Mapping[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run ``make venv`` up to the creation of the environment, which fails."""
    make = shutil.which("make") or pytest.skip("there is no make")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    return run([make, "venv", *arguments], folder, fakes)


def mac(version: str, **pythons: str) -> dict[str, str]:
    return {"uname": "echo Darwin", "sw_vers": f"echo {version}", **pythons}


@pytest.mark.parametrize("version", ["14.0", "26.1"])
def test_a_mac_that_mlx_has_wheels_for_is_accepted(tmp_path: Path, version: str) -> None:
    done = make_venv(tmp_path, mac(version, python3=python()))
    assert "Creating .venv with Python 3.12.1" in done.stdout


@pytest.mark.parametrize("version", ["13.6.1", "13", "10.15.7"])
def test_an_older_macos_is_refused_with_a_sentence(tmp_path: Path, version: str) -> None:
    done = make_venv(tmp_path, mac(version, python3=python()))
    assert done.returncode == 2
    assert f"macOS 14 or newer is needed, and this is macOS {version}" in done.stderr
    assert "Creating" not in done.stdout


def test_rosetta_is_refused_with_a_sentence(tmp_path: Path) -> None:
    done = make_venv(tmp_path, mac("15.5", python3=python("x86_64")))
    assert done.returncode == 2
    assert "Python 3.11 to 3.14 for Apple Silicon (arm64; Rosetta cannot run MLX)" in done.stderr
    assert "was not found" in done.stderr


def test_a_python_for_apple_silicon_is_preferred(tmp_path: Path) -> None:
    pythons = {"python3": python("x86_64"), "python3.12": python()}
    done = make_venv(tmp_path, mac("15.5", **pythons))
    assert "Creating .venv" in done.stdout


@pytest.mark.parametrize(
    "named", [python("x86_64"), python(version=(3, 10)), python(version=(3, 15))]
)
def test_a_named_python_is_checked_too(tmp_path: Path, named: str) -> None:
    fakes = mac("15.5", python3=python(), other=named)
    done = make_venv(tmp_path, fakes, "PYTHON=other")
    assert done.returncode == 2
    assert "is needed; other is another one." in done.stderr


def test_linux_is_asked_for_no_more_than_a_version(tmp_path: Path) -> None:
    fakes = {"uname": "echo Linux", "python3": python("x86_64")}
    assert "Creating .venv" in make_venv(tmp_path, fakes).stdout


def test_linux_without_a_suitable_python_is_told(tmp_path: Path) -> None:
    fakes = {"uname": "echo Linux", "python3": python(version=(3, 9))}
    done = make_venv(tmp_path, fakes)
    assert "Python 3.11 to 3.14 is needed and was not found" in done.stderr


APT = 'echo "apt-get $*" >> calls'
MAKE = 'echo "make $*" >> calls'
SUDO = 'shift; exec "$@"'
PROGRAMS = ("clang", "nginx", "haproxy")
STEPS = ("test", "test-slow", "scale-out", "corpus-sample", "test-engines")
TARGETS = [f"make {name}" for name in STEPS]


@pytest.mark.parametrize(
    ("fakes", "installs", "says"),
    [
        (dict.fromkeys(PROGRAMS, "exit 0") | {"apt-get": APT, "sudo": SUDO}, False, False),
        ({"apt-get": APT, "sudo": SUDO}, True, False),
        ({"apt-get": "exit 100", "sudo": SUDO}, False, True),
        ({"apt-get": "exit 100", "sudo": "exit 1"}, False, True),
        ({}, False, False),
    ],
    ids=["there", "installed", "no network", "no permission", "no apt"],
)
def test_ci_installs_programs_where_it_may(
    tmp_path: Path, fakes: dict[str, str], installs: bool, says: bool
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    done = run([str(tmp_path / ".ci" / "run")], tmp_path, {"make": MAKE, **fakes})
    assert done.returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-len(TARGETS) :] == TARGETS
    for name in PROGRAMS:
        assert any("install" in call and name in call for call in calls) is installs
        assert (f"{name} cannot be installed" in done.stderr) is says


def mac_steps() -> list[dict]:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    return workflow["jobs"]["macos"]["steps"]


def test_ci_compiles_every_kernel_on_a_mac_and_keeps_the_report() -> None:
    commands = [step.get("run") for step in mac_steps()]
    assert "make test" in commands
    device_tests = "tests/kernels/test_on_metal.py"
    assert (ROOT / device_tests).is_file()
    assert f'make test-slow ARGS="tests/kernels --ignore={device_tests}"' in commands
    assert any(f"make test-slow ARGS={device_tests} " in (command or "") for command in commands)
    (kept,) = (step for step in mac_steps() if "upload-artifact" in step.get("uses", ""))
    assert (kept["if"], kept["with"]["path"]) == ("always()", "doctor.json")


@pytest.mark.parametrize("status", [0, 2])
def test_a_kernel_that_fails_on_the_gpu_is_a_warning_of_ci(tmp_path: Path, status: int) -> None:
    (script,) = (step["run"] for step in mac_steps() if step.get("name") == "kernels on the GPU")
    done = run(["/bin/bash", "-e", "-c", script], tmp_path, {"make": f"exit {status}"})
    assert done.returncode == 0
    assert ("::warning" in done.stdout) is (status != 0)


@pytest.mark.parametrize(
    ("status", "passes"), [(0, True), (REJECTED, True), (1, False), (2, False)]
)
def test_a_rejected_kernel_is_a_warning_of_ci(tmp_path: Path, status: int, passes: bool) -> None:
    (script,) = (step["run"] for step in mac_steps() if step.get("name") == "doctor")
    interpreter = tmp_path / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f"#!/bin/sh\necho '{{}}'\nexit {status}\n")
    interpreter.chmod(0o700)
    # GitHub runs steps so.
    done = run(["/bin/bash", "-e", "-c", script], tmp_path, {})
    assert (done.returncode == 0) is passes
    assert ("::warning" in done.stdout) is (status == REJECTED)
    assert (tmp_path / "doctor.json").read_text() == "{}\n"
