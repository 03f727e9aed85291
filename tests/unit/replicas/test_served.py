"""Servers that start with other files under the same name are no fleet."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.replicas.served import ServedModels


async def served(path: str | None, *names: str) -> ServedModels:
    models = ServedModels([ModelConfig(path=path, served_names=names)])
    await models.look()
    return models


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "copy"))


async def test_a_copy_in_another_folder_is_the_same(copied: Path) -> None:
    ours, other = await served(None, "m"), await served(str(copied), "m")
    assert ours.marks["m"]
    assert ours.difference(other.marks) is None


def change_weights(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")


def change_config(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().rstrip()[:-1] + ', "quantization": {"bits": 4}}')


@pytest.mark.parametrize("change", [change_weights, change_config])
async def test_other_files_under_one_name_are_named(
    copied: Path, change: Callable[[Path], None]
) -> None:
    change(copied)
    ours, other = await served(None, "m"), await served(str(copied), "m")
    assert ours.difference(other.marks) == "has other files of m than this server"


async def test_a_server_that_is_starting_is_not_taken_for_the_same() -> None:
    ours = await served(None, "m")
    other = ServedModels([ModelConfig(served_names=("m",))])
    for difference in (ours.difference(other.marks), other.difference(ours.marks)):
        assert difference == "cannot be compared yet: a server is starting"


async def test_other_names_are_named() -> None:
    ours, other = await served(None, "m"), await served(None, "n")
    assert ours.difference(other.marks) == "serves n, and this server m"


async def test_what_is_not_on_this_disk_is_not_compared() -> None:
    ours, other = await served(None, "m"), await served("org/not-on-this-disk", "m")
    assert ours.difference(other.marks) is None
    assert other.difference(ours.marks) is None


@pytest.mark.parametrize(
    ("mine", "theirs", "is_same"),
    [
        ("a.", "a.x", True),
        ("a.x", "a.x", True),
        ("a.x", "a.y", False),
        ("a.x", "b.x", False),
        ("", "a.x", True),
    ],
)
def test_digests_of_all_bytes_count_once_both_are_known(
    mine: str, theirs: str, *, is_same: bool
) -> None:
    models = ServedModels([ModelConfig(served_names=("m",))])
    models.marks = {"m": mine}
    assert (models.difference({"m": theirs}) is None) == is_same
