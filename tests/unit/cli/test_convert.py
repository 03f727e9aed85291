"""``mlx_parallm models convert`` passes its options to mlx_lm's conversion."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import pytest

from mlx_parallm import demo_models
from mlx_parallm.cli.main import main
from mlx_parallm.cli.models.command import add_arguments
from mlx_parallm.cli.models.convert import OPTIONS, SWITCHES, conversion_arguments
from mlx_parallm.cli.parser import CommandParser

#: The package has a function of the same name.
mlx_lm_convert = importlib.import_module("mlx_lm.convert")
CHAT = Path(demo_models.__file__).parent / "chat"
#: What the positional argument stands for, and what sends files elsewhere.
NOT_PASSED = {"--help", "--hf-path", "--model", "--upload-repo"}


def parsed(*arguments: str) -> argparse.Namespace:
    parser = CommandParser(prog="models")
    add_arguments(parser)
    return parser.parse_args(["convert", *arguments])


def test_every_option_of_mlx_lm_is_taken() -> None:
    theirs = mlx_lm_convert.configure_parser()._option_string_actions
    names = {name for name in theirs if name.startswith("--")}
    ours = {*OPTIONS, *(name for names in SWITCHES.values() for name in names)}
    assert names - NOT_PASSED == {name for name in ours if name.startswith("--")}
    for name, options in OPTIONS.items():
        assert options.get("choices") in (None, tuple(theirs[name].choices or ()))


def test_options_are_passed_on() -> None:
    args = parsed("org/name", "-q", "--q-bits", "4", "--dtype", "float16", "--mlx-path", "out")
    expected = ["--hf-path", "org/name", "--mlx-path", "out", "--q-bits", "4"]
    expected += ["--dtype", "float16", "--quantize"]
    assert conversion_arguments(args) == expected
    mlx_lm_convert.configure_parser().parse_args(expected)


def test_a_folder_that_exists_is_not_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "convert", "org/name", "--mlx-path", str(tmp_path)]) == 2
    assert f"{tmp_path} exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demonstration_model_is_quantised(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    flags = ["--mlx-path", str(folder), "-q", "--q-bits", "8"]
    assert main(["models", "convert", str(CHAT), *flags]) == 0
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"]["bits"] == 8
