"""A check that every pinned version has a wheel for all supported systems and Pythons.

It asks pip to resolve each requirements file, without dependencies, for other platforms than this
one. Nothing is installed. The exit status is 1 if a pin has no wheel somewhere.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# MACOS and LINUX: newer systems accept wheels of older tags, so pip gets all of these tags.
MACOS = ("macosx_14_0_arm64", "macosx_13_0_arm64", "macosx_12_0_arm64", "macosx_11_0_arm64")
LINUX = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(35, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A requirements file and its system."""

    name: str
    files: tuple[str, ...]
    sys_platform: str
    platforms: tuple[str, ...]


TARGETS = (
    Target("macOS 14 arm64", ("darwin.txt", "dev.txt"), "darwin", MACOS),
    Target("Linux x86-64, CPU", ("linux-cpu.txt", "dev.txt"), "linux", LINUX),
    Target("Linux x86-64, CUDA 12", ("linux-cuda12.txt",), "linux", LINUX),
    Target("Linux x86-64, CUDA 13", ("linux-cuda13.txt",), "linux", LINUX),
)


def read_requirements(file: Path) -> list[Requirement]:
    """Return the requirements of a file and of those it includes with ``-r``."""
    requirements: list[Requirement] = []
    for line in file.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            requirements += read_requirements(file.parent / text.removeprefix("-r ").strip())
        elif text:
            requirements.append(Requirement(text))
    return requirements


def pins(target: Target, python: str) -> list[str]:
    """Return the pins that apply to the target; pip would evaluate markers for this machine."""
    environment = {
        "sys_platform": target.sys_platform,
        "platform_system": target.sys_platform.capitalize(),
        "python_version": python,
    }
    return sorted(
        {
            f"{requirement.name}{requirement.specifier}"
            for file in target.files
            for requirement in read_requirements(REQUIREMENTS / file)
            if requirement.marker is None or requirement.marker.evaluate(environment)
        }
    )


def pip_command(target: Target, python: str, folder: str) -> list[str]:
    """Return the pip command that fails if a pin of the target has no wheel for this Python."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--dry-run", "--ignore-installed", "--target", folder]
    command += ["--no-deps", "--only-binary=:all:", "--python-version", python]
    for platform in target.platforms:
        command += ["--platform", platform]
    return command + pins(target, python)


def check(target: Target, python: str) -> tuple[str, str]:
    """Return the name of the check, and pip's error, which is empty on success."""
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            pip_command(target, python, folder), capture_output=True, text=True, check=False
        )
    complaint = result.stderr.strip() if result.returncode else ""
    return f"{target.name}, Python {python}", complaint


def main() -> int:
    """Check every target; print a line for each."""
    parser = argparse.ArgumentParser(description="Prove that every pin exists.")
    parser.add_argument("--python", action="append", help="only this version, e.g. 3.12")
    pythons = parser.parse_args().python or PYTHONS
    jobs = [(target, python) for target in TARGETS for python in pythons]
    failed = False
    with ThreadPoolExecutor(max_workers=2) as pool:
        for name, complaint in pool.map(lambda job: check(*job), jobs):
            print(f"{'FAILED' if complaint else 'ok':<7}{name}", flush=True)
            if complaint:
                failed = True
                print(complaint, file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
