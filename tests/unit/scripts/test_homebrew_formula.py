"""The Homebrew formula agrees with the version and the pins, and can be filled in."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from mlx_parallm import __version__
from scripts.check_pins import REQUIREMENTS, read_requirements
from scripts.write_homebrew_formula import PLACEHOLDER, ROOT, TARGET, render


def test_the_formula_is_up_to_date() -> None:
    assert TARGET.read_text(encoding="utf-8") == render(), "run: make docs"


def test_it_pins_what_a_mac_needs() -> None:
    text = render()
    (block,) = re.findall(r"PINS = %w\[\n(.*?)\n  \]", text, re.DOTALL)
    pinned = {Requirement(line.strip()).name for line in block.splitlines()}
    needed = {each.name for each in read_requirements(REQUIREMENTS / "darwin.txt")}
    assert needed <= pinned
    assert {"mlx-metal", "hatchling"} <= pinned
    assert f'version "{__version__}"' in text
    assert "://" not in text


def test_every_block_ends() -> None:
    lines = [line.strip() for line in render().splitlines()]
    opened = [line for line in lines if re.match(r"(class|def) |.* do$", line)]
    assert len(opened) == lines.count("end") > 3


def test_it_is_filled_in(tmp_path: Path) -> None:
    sdist, output = tmp_path / "a.tar.gz", tmp_path / "mlx-parallm.rb"
    sdist.write_bytes(b"files")
    command = [sys.executable, "scripts/write_homebrew_formula.py", "--output", str(output)]
    command += ["--url", "https://x.test/a.tar.gz", "--homepage", "https://x.test"]
    env = {"PYTHONPATH": str(ROOT)}
    half = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=False)
    assert half.returncode == 2
    subprocess.run([*command, "--sdist", str(sdist)], cwd=ROOT, env=env, check=True)
    text = output.read_text()
    assert not PLACEHOLDER.search(text)
    assert f'sha256 "{hashlib.sha256(b"files").hexdigest()}"' in text
    assert 'url "https://x.test/a.tar.gz"' in text
