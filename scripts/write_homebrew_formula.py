"""The generator of packaging/homebrew/mlx-parallm.rb, a formula for a tap.

    PYTHONPATH=. python scripts/write_homebrew_formula.py
    PYTHONPATH=. python scripts/write_homebrew_formula.py --url URL --sdist dist/FILE.tar.gz \
        --homepage URL --output FILE

The first command writes the file with placeholders, from the version and the pins; a test compares
it. The second fills them in, with the checksum of the sdist that `make dist` built.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mlx_parallm import __version__
from scripts.check_pins import TARGETS, pins

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "packaging" / "homebrew" / "mlx-parallm.rb"
#: PYTHON: the version for which the formula's pins are chosen, and which it depends on.
PYTHON = "3.12"
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
FORMULA = """\
class MlxParallm < Formula
  include Language::Python::Virtualenv

  desc "Model server with OpenAI's API for many clients, built on MLX"
  homepage "{{homepage}}"
  url "{{url}}"
  version "@VERSION@"
  sha256 "{{sha256}}"
  license "MIT"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@@PYTHON@"

  # MLX is published as wheels alone, so the pinned wheels are installed as they are.
  PINS = %w[
@PINS@
  ].freeze

  def install
    virtualenv_create(libexec, "python@PYTHON@", without_pip: false)
    pip = [libexec/"bin/python", "-m", "pip", "install", "--no-deps"]
    system(*pip, "--only-binary=:all:", *PINS)
    system(*pip, "--no-build-isolation", buildpath)
    bin.install_symlink libexec/"bin/mlx_parallm", libexec/"bin/mlx-parallm"
  end

  service do
    run [opt_bin/"mlx_parallm", "serve"]
    keep_alive successful_exit: false
    environment_variables MLX_PARALLM_DATA_DIR: var/"mlx-parallm"
    log_path var/"log/mlx-parallm.log"
    error_log_path var/"log/mlx-parallm.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlx_parallm --version")
  end
end
"""


def render() -> str:
    """Return the formula with placeholders for what is known when a version is published."""
    mac = next(target for target in TARGETS if target.sys_platform == "darwin")
    # Hatchling builds the package, and is pinned apart.
    needed = pins(replace(mac, files=("darwin.txt", "build.txt")), PYTHON)
    values = {
        "@VERSION@": __version__,
        "@PINS@": "\n".join(f"    {pin}" for pin in needed),
        "@PYTHON@": PYTHON,
    }
    text = FORMULA
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a formula without placeholders; raise KeyError for one that has no value."""
    return PLACEHOLDER.sub(lambda match: values[match[1]], text)


def main() -> None:
    """Write the formula with placeholders, or fill them in."""
    parser = argparse.ArgumentParser(description="Write the Homebrew formula.")
    parser.add_argument("--url", help="where the sdist is published")
    parser.add_argument("--sdist", type=Path, help="the sdist, for its checksum")
    parser.add_argument("--homepage", help="the project's page")
    parser.add_argument("--output", type=Path, default=TARGET, help="the file to write")
    args = parser.parse_args()
    text = render()
    wanted = (args.url, args.sdist, args.homepage)
    if any(wanted):
        if not all(wanted) or args.output == TARGET:
            parser.error("give all of --url, --sdist, --homepage and --output")
        checksum = hashlib.sha256(args.sdist.read_bytes()).hexdigest()
        text = filled(text, {"url": args.url, "homepage": args.homepage, "sha256": checksum})
    args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
