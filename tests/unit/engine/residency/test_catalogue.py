"""Models that lie in folders: what is listed, under which names, and what is not opened."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config import LoadingConfig
from mlx_parallm.engine.catalogue import Catalogue


def write_model(folder: Path, *, weights: int = 10) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if weights:
        (folder / "model.safetensors").write_bytes(b"x" * weights)
    return folder


def names(*roots: Path) -> dict[str, int]:
    catalogue = Catalogue(LoadingConfig(directories=tuple(map(str, roots))))
    return {model.name: model.size_bytes for model in catalogue.scan().values()}


def test_folders_and_organisations_are_listed_by_their_paths(tmp_path: Path) -> None:
    write_model(tmp_path / "one", weights=5)
    write_model(tmp_path / "org" / "two")
    write_model(tmp_path / "deep" / "er" / "three")
    write_model(tmp_path / ".hidden")
    assert names(tmp_path) == {"one": 5, "org/two": 10}


def test_half_a_download_and_other_folders_are_not_models(tmp_path: Path) -> None:
    write_model(tmp_path / "half", weights=0)
    (tmp_path / "weights only").mkdir()
    (tmp_path / "weights only" / "model.safetensors").touch()
    (tmp_path / "file").touch()
    assert names(tmp_path) == {}


def test_links_out_of_the_root_and_in_circles_are_not_followed(tmp_path: Path) -> None:
    outside = write_model(tmp_path / "outside")
    root = tmp_path / "root"
    inside = write_model(root / "inside")
    (root / "link").symlink_to(outside)
    (root / "alias").symlink_to(inside)
    (root / "loop").symlink_to(root / "loop")
    (root / "up").symlink_to(root)
    (root / "file.gguf").symlink_to(outside / "model.safetensors")
    # A circle through the root ends after one organisation.
    assert set(names(root)) == {"inside", "alias", "up/inside", "up/alias"}


def test_a_missing_or_unreadable_root_has_no_models(tmp_path: Path) -> None:
    assert names(tmp_path / "none") == {}


def test_of_equal_names_the_first_root_counts(tmp_path: Path) -> None:
    write_model(tmp_path / "a" / "same", weights=1)
    write_model(tmp_path / "b" / "same", weights=2)
    assert names(tmp_path / "a", tmp_path / "b") == {"same": 1}
    assert names(tmp_path / "b", tmp_path / "a") == {"same": 2}


def test_gguf_files_are_listed_and_split_ones_once(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(b"x" * 3)
    for part in (1, 2):
        (tmp_path / f"big-0000{part}-of-00002.gguf").write_bytes(b"x" * part)
    assert names(tmp_path) == {"one.gguf": 3, "big-00001-of-00002.gguf": 3}


@pytest.mark.parametrize("name", ["a\nb", "x" * 300, "tab\t"])
def test_hostile_names_are_left_out(tmp_path: Path, name: str) -> None:
    if len(name) < 256:
        write_model(tmp_path / name)
    else:
        write_model(tmp_path / name[:150] / name[150:])
    assert names(tmp_path) == {}


def test_the_hub_cache_is_listed_by_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.engine.catalogue.HF_HUB_CACHE", str(tmp_path))
    first = tmp_path / "models--org--a--b"
    write_model(first / "snapshots" / "old")
    write_model(first / "snapshots" / "new", weights=7)
    (first / "refs").mkdir()
    (first / "refs" / "main").write_text("new")
    write_model(tmp_path / "models--gpt2" / "snapshots" / "only", weights=2)
    two = tmp_path / "models--org--two"
    write_model(two / "snapshots" / "x")
    write_model(two / "snapshots" / "y")
    write_model(tmp_path / "datasets--org--d" / "snapshots" / "z")
    models = Catalogue(LoadingConfig(scans_hub_cache=True)).scan()
    # A model with several snapshots and no main branch is left out.
    assert {model.name: model.size_bytes for model in models.values()} == {"org/a--b": 7, "gpt2": 2}
    assert models["org/a--b"].path == first / "snapshots" / "new"


def test_a_hub_cache_that_is_a_link_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "real" / "models--org--a" / "snapshots" / "only", weights=3)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setattr("mlx_parallm.engine.catalogue.HF_HUB_CACHE", str(tmp_path / "link"))
    models = Catalogue(LoadingConfig(scans_hub_cache=True)).scan()
    assert {model.name: model.size_bytes for model in models.values()} == {"org/a": 3}


def test_nothing_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        write_model(tmp_path / str(number))

    def refuse(*args: Any, **more: Any) -> Any:
        raise AssertionError(f"{args} is opened")

    catalogue = Catalogue(LoadingConfig(directories=(str(tmp_path),)))
    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    models = catalogue.scan()
    monkeypatch.undo()
    assert len(models) == 20


def test_without_folders_there_is_nothing_to_look_at() -> None:
    catalogue = Catalogue(LoadingConfig())
    assert not catalogue
    assert catalogue.scan() == {}


@pytest.mark.parametrize(
    "path",
    [
        "x.gguf",
        "x-00001-of-00002.gguf",
        "x-00002-of-00002.gguf",
        "x",
        "org/x.gguf",
        "org/x",
        "model/config.json",
        "model/more.safetensors",
        "model/more.gguf",
    ],
)
def test_a_link_to_itself_hides_no_other_model(tmp_path: Path, path: str) -> None:
    write_model(tmp_path / "a")
    write_model(tmp_path / "z")
    link = tmp_path / path
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(link)
    assert {"a", "z"} <= set(names(tmp_path)) <= {"a", "z", "model"}


@pytest.mark.parametrize("path", ["refs/main", "snapshots", "snapshots/abc", "snapshots/x.gguf"])
def test_a_link_to_itself_in_the_hubs_cache_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("mlx_parallm.engine.catalogue.HF_HUB_CACHE", str(tmp_path))
    write_model(tmp_path / "models--org--fine" / "snapshots" / "abc")
    link = tmp_path / "models--org--x" / path
    link.parent.mkdir(parents=True)
    link.symlink_to(link)
    config = LoadingConfig(scans_hub_cache=True)
    assert set(Catalogue(config).scan()) == {"org/fine"}


def test_a_root_that_links_to_itself_has_no_models(tmp_path: Path) -> None:
    (tmp_path / "root").symlink_to(tmp_path / "root")
    write_model(tmp_path / "other" / "a")
    assert names(tmp_path / "root", tmp_path / "other") == {"a": 10}
