"""Which paths and ids of adapters requests may name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from mlx_parallm.adapters.folder import CONFIG_NAME
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


def test_an_adapter_has_one_name_where_case_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Find a folder by each of two names, as a Mac's disk does, which lists it as the first."""
    listed = {"SQL": "sql"}

    def names_in(folder: Path) -> Iterable[str]:
        return [listed.get(name, name) for name in os.listdir(folder)]

    monkeypatch.setattr(adapter_folders, "is_spelled", partial(is_spelled, list_names=names_in))
    for name in ("sql", "SQL"):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG_NAME).touch()
    folders = AdapterFolders(AdapterConfig(directory=str(tmp_path)))
    assert folders.find("sql") == tmp_path / "sql"
    assert folders.find("SQL") is None
