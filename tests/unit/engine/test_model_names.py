"""By which names clients find the models of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.build import check_names, model_names, with_short_names
from mlx_parallm.types.errors import MAX_LISTED_MODELS, ModelNotFoundError


def names(*models: ModelConfig) -> list[tuple[str, ...]]:
    check_names(models)
    return [model_names(model) for model in with_short_names(models)]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = tmp_path / "models" / "qwen-tiny"
    path.mkdir(parents=True)
    return str(path)


def test_the_last_part_of_a_folders_path_is_a_name(folder: str) -> None:
    assert names(ModelConfig(path=folder)) == [(folder, "qwen-tiny")]
    assert names(ModelConfig(path=f"{folder}/")) == [(f"{folder}/", "qwen-tiny")]


def test_an_id_and_the_demonstration_model_have_no_other_name() -> None:
    assert names(ModelConfig(path="org/name"), ModelConfig(path="demo:mlm")) == [
        ("org/name",),
        ("demo:mlm",),
    ]
    assert len(names(ModelConfig())[0]) == 1


def test_names_that_were_given_are_the_only_ones(folder: str) -> None:
    assert names(ModelConfig(path=folder, served_names=("mine",))) == [("mine",)]


def test_a_name_of_another_model_wins(folder: str) -> None:
    other = ModelConfig(path="org/other", served_names=("qwen-tiny",))
    assert names(ModelConfig(path=folder), other) == [(folder,), ("qwen-tiny",)]


def test_two_folders_of_one_name_have_none(folder: str, tmp_path: Path) -> None:
    second = tmp_path / "others" / "qwen-tiny"
    second.mkdir(parents=True)
    models = (ModelConfig(path=folder), ModelConfig(path=str(second)))
    assert names(*models) == [(folder,), (str(second),)]


def test_a_folder_that_is_its_own_short_name(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(folder).parent)
    assert names(ModelConfig(path="qwen-tiny")) == [("qwen-tiny",)]


def test_a_refusal_lists_what_is_served() -> None:
    assert str(ModelNotFoundError("x")) == "The model `x` does not exist."
    assert str(ModelNotFoundError("x", ["a", "b"])).endswith("not exist. Served here: a, b.")
    many = [str(number) for number in range(MAX_LISTED_MODELS + 3)]
    assert str(ModelNotFoundError("x", many)).endswith(f"{MAX_LISTED_MODELS - 1} and 3 more.")
