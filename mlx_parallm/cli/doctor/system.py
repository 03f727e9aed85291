"""Facts about the system under this process that an issue report needs."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_parallm.process_setup.device_process import default_variables

# PREFIX: variables of MLX and of this program begin with it.
PREFIX = "MLX_"
# SECRET: parts of the names of variables whose values are hidden, unless the name is HARMLESS too:
# that of a limit, of a number of the model's tokens, or of a file.
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
HARMLESS = re.compile(r"MLX_(PARALLM_)?MAX_\w+|\w+_(SNAPSHOT|MIN)_TOKENS|\w+_FILE")
HIDDEN = "(set)"
# REMOVED: stands for the user, the password and the query of a URL.
REMOVED = "..."
# SYSCTL: names of facts. macOS leaves names that it does not know out of its answer.
SYSCTL = (
    "kern.osproductversion",
    "kern.osversion",
    "hw.model",
    "hw.memsize",
    "iogpu.wired_limit_mb",
    "vm.swapusage",
    "sysctl.proc_translated",
)
# TIMEOUT_S: a command that takes longer says nothing.
TIMEOUT_S = 10.0
_URL = re.compile(r"\w[\w+.-]*://\S+?(?=[\s,;]+\w[\w+.-]*://|\s|$)")
_SIZE = re.compile(r"(\w+) = ([\d.,]+)([KMGT]?)")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class MacReport:
    """A Mac and its macOS; None for what the system did not say.

    Attributes:
        version: of macOS, such as "15.5".
        build: of macOS, such as "24F74".
        model: of the Mac, such as "Mac14,9".
        memory_bytes: all of its memory (hw.memsize).
        wired_limit_mb: most MiB that the GPU may wire (iogpu.wired_limit_mb); 0: macOS decides.
        swap_total_bytes: size of the swap files.
        swap_used_bytes: bytes in them.
        is_translated: True if Rosetta runs this process, whose Python is for Intel then.
    """

    version: str | None = None
    build: str | None = None
    model: str | None = None
    memory_bytes: int | None = None
    wired_limit_mb: int | None = None
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    is_translated: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemReport:
    """The system under this process.

    Attributes:
        platform: its name and version.
        machine: the instruction set, such as "arm64".
        descriptors: soft and hard limit of open files (RLIMIT_NOFILE); -1 is no limit.
        variables: those that begin with ``PREFIX``, as ``shown_value`` gives them.
        defaults: names of the variables whose value is the one that this program sets if the user
            does not.
        mac: of a Mac; None on other systems.
    """

    platform: str
    machine: str
    descriptors: tuple[int, int]
    variables: dict[str, str]
    defaults: tuple[str, ...] = ()
    mac: MacReport | None = None


def system_report(environment: Mapping[str, str] = os.environ) -> SystemReport:
    """Return facts about the system and this process."""
    # A variable: type checkers take ``sys.platform`` for the one they run on.
    system = sys.platform
    return SystemReport(
        platform=platform.platform(),
        machine=platform.machine(),
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE),
        variables={
            name: shown_value(name, value)
            for name, value in sorted(environment.items())
            if name.startswith(PREFIX)
        },
        defaults=tuple(
            name for name, value in default_variables().items() if environment.get(name) == value
        ),
        mac=mac_report(_sysctl()) if system == "darwin" else None,
    )


def shown_value(name: str, value: str) -> str:
    """Return the value of a variable without secrets; ``HIDDEN`` if all of it may be secret."""
    if SECRET.search(name) and not HARMLESS.fullmatch(name):
        return HIDDEN
    return _URL.sub(lambda url: _without_secrets(url.group()), value)


def _without_secrets(url: str) -> str:
    """Return a URL without user, password, query and fragment."""
    # A password may hold any letter where it is not quoted, so all up to the last @ is removed.
    url = re.sub(r"(?<=://).*@", f"{REMOVED}@", url)
    return re.sub(r"([?#]).*", rf"\1{REMOVED}", url)


def mac_report(output: str) -> MacReport:
    """Return what ``sysctl`` says of a Mac, from its output for ``SYSCTL``."""
    lines = (line.partition(": ") for line in output.splitlines())
    values = {name: value.strip() for name, _, value in lines}
    swap = {
        name: int(float(number.replace(",", ".")) * (1 << _UNITS[unit]))
        for name, number, unit in _SIZE.findall(values.get("vm.swapusage", ""))
    }
    translated = _number(values.get("sysctl.proc_translated"))
    return MacReport(
        version=values.get("kern.osproductversion"),
        build=values.get("kern.osversion"),
        model=values.get("hw.model"),
        memory_bytes=_number(values.get("hw.memsize")),
        wired_limit_mb=_number(values.get("iogpu.wired_limit_mb")),
        swap_total_bytes=swap.get("total"),
        swap_used_bytes=swap.get("used"),
        is_translated=None if translated is None else translated == 1,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _sysctl() -> str:
    """Return the answer of ``sysctl``; empty if there is none."""
    command = ["sysctl", *SYSCTL]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
