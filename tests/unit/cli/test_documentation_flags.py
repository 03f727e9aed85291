"""Every setting that the documentation names exists, and its examples of settings are accepted."""

from __future__ import annotations

import argparse
import configparser
import functools
import plistlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from mlx_parallm import __version__
from mlx_parallm.art.interpreter import PYTHON_VARIABLE
from mlx_parallm.cli.configure import add_arguments, build_config, from_file
from mlx_parallm.cli.settings import SETTINGS
from tests.documentation import Block, read_blocks
from tests.server_process import ROOT

PAGES = (
    "README.md",
    *(
        f"{folder}/{path.name}"
        for folder in ("docs", "benchmarks/results")
        for path in sorted((ROOT / folder).glob("*.md"))
    ),
)
OPERATIONS = "docs/operations.md"
#: The pages name these options of other programs.
OTHER_OPTIONS = {
    "curl": {"--data-binary"},
    "docker": {
        "--build",
        "--build-arg",
        "--cpus",
        "--cpuset-cpus",
        "--gpus",
        "--ipc",
        "--memory",
        "--shm-size",
    },
    "hf": {"--local-dir"},
    "mlx.launch": {"--env", "--nccl-port", "--starting-port"},
    "mlx.distributed_config": {"--auto-setup", "--over"},
    "omlx": {"--hot-cache-max-size"},
    "sglang-router": {"--disable-retries", "--policy", "--service-discovery"},
    "systemctl": {"--now"},
}
FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*[a-z0-9])(?![\w-])")
DECLARED_FLAG = re.compile(r"\"(--[a-z][a-z0-9-]*)\"")
VARIABLE = re.compile(r"\bMLX_PARALLM_[A-Z_]+\b")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str, language: str) -> list[Block]:
    return [block for block in read_blocks(page, text_of(page)) if block.language == language]


def flags_of_settings() -> set[str]:
    names = {f"--{name}" for setting in SETTINGS for name in setting.names}
    return names | {f"--no-{setting.name}" for setting in SETTINGS if setting.is_switch}


@functools.cache
def flags_of_programs() -> set[str]:
    """Return the flags of the other commands, benchmarks, scripts and demonstrations."""
    folders = ("mlx_parallm", "demo", "benchmarks", "loadtests", "examples", "scripts")
    files = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    return {flag for path in files for flag in DECLARED_FLAG.findall(path.read_text("utf-8"))}


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_a_page_names_exists(page: str) -> None:
    named = set(FLAG.findall(text_of(page)))
    # Operators have only the server: there a flag of anything else is a mistake.
    known = flags_of_settings() | {"--config"}
    if page != OPERATIONS:
        known |= flags_of_programs()
    assert named <= known.union(*OTHER_OPTIONS.values())


@pytest.mark.parametrize("page", PAGES)
def test_every_variable_that_a_page_names_exists(page: str) -> None:
    named = set(VARIABLE.findall(text_of(page)))
    assert named - {"MLX_PARALLM_NAME"} <= {setting.variable for setting in SETTINGS} | {
        "MLX_PARALLM_CONFIG",
        PYTHON_VARIABLE,
    }


@pytest.mark.parametrize("page", [OPERATIONS, "docs/configuration.md"])
def test_every_settings_file_that_a_page_shows_is_accepted(page: str, tmp_path: Path) -> None:
    # Probes are a part of a description of Kubernetes, not settings.
    blocks = [block for block in blocks_of(page, "yaml") if "Probe:" not in block.text]
    assert blocks
    for block in blocks:
        file = tmp_path / "serve.yaml"
        file.write_text(block.text)
        build_config(from_file(file))


def test_the_units_start_a_server_that_takes_their_flags() -> None:
    (plist,) = blocks_of(OPERATIONS, "xml")
    units = [block.text for block in blocks_of(OPERATIONS, "ini") if "[Service]" in block.text]
    assert units
    # A shell starts what follows its own arguments.
    shell, option, _script, *command = plistlib.loads(plist.text.encode())["ProgramArguments"]
    assert (shell, option) == ("/bin/sh", "-c")
    commands = [command]
    for unit in units:
        # A key may come several times, as Environment does.
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.read_string(unit)
        commands.append(shlex.split(parser["Service"]["ExecStart"]))
    for _program, name, *arguments in commands:
        assert name == "serve"
        command = argparse.ArgumentParser(exit_on_error=False)
        add_arguments(command)
        command.parse_args(arguments)


def test_the_agent_keeps_a_mac_awake_as_long_as_its_server_runs(tmp_path: Path) -> None:
    """Run the agent's command with fakes of ``caffeinate`` and of the server."""
    (plist,) = blocks_of(OPERATIONS, "xml")
    *shell, _program, name, _flag, _file = plistlib.loads(plist.text.encode())["ProgramArguments"]
    for fake, script in {
        "caffeinate": 'echo "$*" > awake',
        # The server ends once the other one has written.
        "server": 'until [ -s awake ]; do :; done; echo "$$ $*"',
    }.items():
        (tmp_path / fake).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / fake).chmod(0o700)
    done = subprocess.run(
        [*shell, "./server", name],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    pid, command = done.stdout.split()
    assert command == "serve"
    assert (tmp_path / "awake").read_text().split() == ["-i", "-w", pid]


def test_the_changelog_tells_of_this_version_and_of_what_comes() -> None:
    headings = re.findall(r"^## \[(.+?)\]", text_of("CHANGELOG.md"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", __version__]
    kinds = set(re.findall(r"^### (.+)$", text_of("CHANGELOG.md"), re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
