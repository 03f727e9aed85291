"""Which paths and ids of adapters requests may name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from mlx_parallm.adapters.formats import CONFIG_NAME
from mlx_parallm.config import AdapterConfig
from mlx_parallm.confinement import is_spelled
from mlx_parallm.engine import adapter_folders
from mlx_parallm.engine.adapter_folders import AdapterFolders
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError


@pytest.mark.parametrize(
    ("repos", "path", "is_allowed"),
    [
        ((), "org/name", False),
        (("org/name",), "org/name", True),
        (("org/name",), "org/other", False),
        (("org/*", "x/y"), "org/other", True),
        (("org/*",), "organ/other", False),
        (("*",), "any/thing_1.x-y", True),
        (("*",), "name", False),
        (("*",), "a/b/c", False),
        (("*",), "../name", False),
        (("*",), "org/..", False),
        (("*",), "./name", False),
        (("*",), "/org/name", False),
        (("*",), "org/na me", False),
        (("*",), "org/name\n", False),
        (("*",), "org/" + "x" * 300, False),
    ],
)
def test_ids_on_the_hub_are_those_that_are_allowed(
    repos: tuple[str, ...], path: str, is_allowed: bool
) -> None:
    folders = AdapterFolders(AdapterConfig(allowed_repos=repos))
    assert folders.repo_of(path) == (path if is_allowed else None)


def test_a_folder_comes_before_the_hub(tmp_path: Path) -> None:
    folders = AdapterFolders(AdapterConfig(directory=str(tmp_path), allowed_repos=("*",)))
    assert folders.repo_of("org/name") == "org/name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert folders.repo_of("org/name") is None
    assert folders.resolve("org/name") == tmp_path / "org" / "name"


@pytest.mark.parametrize("has_root", [True, False])
def test_a_refused_id_is_told_the_setting(tmp_path: Path, has_root: bool) -> None:
    roots = (str(tmp_path),) if has_root else ()
    folders = AdapterFolders(AdapterConfig(allowed_roots=roots, allowed_repos=("other/*",)))
    error = NotFoundError if has_root else InvalidRequestError
    with pytest.raises(error, match="--allowed-adapter-repos"):
        folders.resolve("org/name")
    with pytest.raises(error) as refusal:
        folders.resolve("org/name", param="weight_dir")
    assert "hub" not in str(refusal.value)


@pytest.fixture
def ignores_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of one adapter, found by two names as on a Mac, and listed as ``sql``."""
    listed = {"SQL": "sql"}

    def names_in(folder: Path) -> Iterable[str]:
        return [listed.get(name, name) for name in os.listdir(folder)]

    monkeypatch.setattr(adapter_folders, "is_spelled", partial(is_spelled, list_names=names_in))
    for name in ("sql", "SQL"):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG_NAME).touch()
    return tmp_path


def test_an_adapter_has_one_name_where_case_does_not_count(ignores_case: Path) -> None:
    folders = AdapterFolders(AdapterConfig(directory=str(ignores_case)))
    assert folders.find("sql") == ignores_case / "sql"
    assert folders.find("SQL") is None


@pytest.mark.parametrize("param", ["lora_path", "path"])
@pytest.mark.parametrize("is_absolute", [False, True])
@pytest.mark.parametrize("is_directory", [False, True])
def test_a_folder_has_one_path_where_case_does_not_count(
    ignores_case: Path, is_directory: bool, is_absolute: bool, param: str
) -> None:
    config = (
        AdapterConfig(directory=str(ignores_case))
        if is_directory
        else AdapterConfig(allowed_roots=(str(ignores_case),))
    )
    folders = AdapterFolders(config)
    start = f"{ignores_case}/" if is_absolute else ""
    for path in ("sql", "./sql", "SQL/../sql"):
        assert folders.resolve(start + path, param=param) == ignores_case / "sql"
    with pytest.raises(NotFoundError, match="There is no folder"):
        folders.resolve(f"{start}SQL", param=param)


def test_a_root_is_a_folder_itself(tmp_path: Path) -> None:
    folders = AdapterFolders(AdapterConfig(allowed_roots=(str(tmp_path),)))
    assert folders.resolve(str(tmp_path)) == folders.resolve(".") == tmp_path


def test_a_hub_id_is_no_folder_of_other_case(ignores_case: Path) -> None:
    (ignores_case / "sql" / "name").mkdir()
    (ignores_case / "SQL" / "name").mkdir()
    folders = AdapterFolders(AdapterConfig(directory=str(ignores_case), allowed_repos=("*",)))
    assert folders.repo_of("sql/name") is None
    assert folders.repo_of("SQL/name") == "SQL/name"


def test_a_directory_that_cannot_be_listed_has_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse the list of a directory with the right x and without r."""

    def refuse(folder: Path) -> list[str]:
        raise PermissionError(f"no list of {folder}")

    monkeypatch.setattr(adapter_folders, "is_spelled", partial(is_spelled, list_names=refuse))
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / CONFIG_NAME).touch()
    folders = AdapterFolders(AdapterConfig(directory=str(tmp_path)))
    assert folders.find("sql") == folders.resolve("sql") == tmp_path / "sql"
    assert folders.find("./sql") is None
