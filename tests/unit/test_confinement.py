"""Paths lead nowhere but below the roots, and hub ids match a pattern."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_parallm.confinement import Confinement, check_folder, is_gguf, is_hub_id, is_spelled
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    (tmp_path / "root2").mkdir()
    (root / "out").symlink_to(tmp_path / "root2")
    (root / "in").symlink_to(root / "inside")
    return root


@pytest.mark.parametrize(
    ("path", "below"),
    [
        ("inside", "inside"),
        ("absent/../inside", "inside"),
        ("in", "inside"),
        ("absent", "absent"),
        ("", ""),
        ("..", None),
        ("../root2", None),
        ("out", None),
        ("out/deeper", None),
        ("/etc", None),
    ],
)
def test_a_path_leads_below_a_root_or_nowhere(root: Path, path: str, below: str | None) -> None:
    folders = Confinement([str(root)], ()).folders(path, param="model")
    assert folders == ([] if below is None else [root / below])


def test_absolute_paths_need_no_base(root: Path) -> None:
    roots = [str(root), str(root.parent / "root2")]
    confinement = Confinement(roots, ())
    assert confinement.folders(str(root / "inside"), param="model") == [root / "inside"]
    assert confinement.folders("x", param="model") == [root / "x", root.parent / "root2" / "x"]
    based = Confinement(roots, (), bases=[root])
    assert based.folders("x", param="model") == [root / "x"]
    assert based.folders(roots[1], param="model") == [root.parent / "root2"]


def test_without_roots_no_path_leads_anywhere(root: Path) -> None:
    assert Confinement((), ("*",)).folders(str(root), param="model") == []


def test_a_nul_is_refused_by_the_name_of_its_field(root: Path) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        Confinement([str(root)], ()).folders("in\0side", param="lora_path")
    assert refusal.value.param == "lora_path"


@pytest.mark.parametrize(
    ("name", "with_owner", "without_owner"),
    [
        ("org/name", True, True),
        ("name", False, True),
        ("org/na/me", False, False),
        ("../name", False, False),
        ("..", False, False),
        ("", False, False),
        ("org/name\n", False, False),
    ],
)
def test_only_names_of_the_hub_are_hub_ids(
    name: str, with_owner: bool, without_owner: bool
) -> None:
    assert is_hub_id(name) == with_owner
    assert is_hub_id(name, with_owner=False) == without_owner


def test_hub_ids_match_a_pattern_and_are_not_endless() -> None:
    confinement = Confinement((), ("org/*", "bert"))
    assert confinement.allows_repo("org/name")
    assert not confinement.allows_repo("other/name")
    assert not confinement.allows_repo("bert")
    assert confinement.allows_repo("bert", with_owner=False)
    assert not confinement.allows_repo("org/" + "x" * 300)


# COMPOSED, DECOMPOSED: one name, in two forms of Unicode.
COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        ("inside", True),
        ("in", True),
        ("inside/deep", True),
        ("Inside", False),
        ("inside/Deep", False),
        ("", False),
        (".", False),
        ("..", False),
        ("./inside", False),
        ("inside/", False),
        ("inside/../inside", False),
        (DECOMPOSED, True),
        (COMPOSED, False),
        ("Caf\u00e9", False),
        # Snapshots and folders that are mounted when they are entered are not always listed.
        (".snapshot", True),
    ],
)
def test_a_folder_has_the_name_that_is_listed(root: Path, name: str, is_own: bool) -> None:
    (root / "inside" / "deep").mkdir()
    (root / DECOMPOSED).mkdir()
    assert is_spelled(name, root) is is_own


@pytest.mark.parametrize(
    ("listed", "own"),
    [
        ({COMPOSED}, {COMPOSED}),
        ({DECOMPOSED}, {COMPOSED}),
        # A disk that distinguishes them lists both.
        ({COMPOSED, DECOMPOSED}, {COMPOSED, DECOMPOSED}),
        ({"CAF\u00c9"}, {"CAF\u00c9"}),
        ({"CAFE\u0301"}, {"CAF\u00c9"}),
        ({"CAF\u00c9", COMPOSED}, {"CAF\u00c9", COMPOSED}),
    ],
)
def test_a_folder_has_one_name_where_accents_are_composed_or_not(
    tmp_path: Path, listed: set[str], own: set[str]
) -> None:
    """Find a folder by each of four names, as a Mac's disk does."""
    names = (COMPOSED, DECOMPOSED, "CAF\u00c9", "CAFE\u0301")
    for name in names:
        (tmp_path / name).mkdir(exist_ok=True)
    assert {name for name in names if is_spelled(name, tmp_path, lambda _: listed)} == own


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError, OSError])
def test_a_folder_that_may_be_entered_but_not_listed_finds_any_name(
    root: Path, error: type[OSError]
) -> None:
    def refuse(folder: Path) -> list[str]:
        raise error(f"no list of {folder}")

    assert is_spelled("inside", root, refuse)
    assert is_spelled("inside/deep", root, refuse)
    assert not is_spelled("inside/../inside", root, refuse)
    assert not is_spelled("./inside", root, refuse)


def test_a_gguf_file_is_one_by_its_name_or_its_first_bytes(tmp_path: Path) -> None:
    """Ollama's files have digests as names."""
    files = {"a.gguf": b"", "sha256-1f": b"GGUF\3", "model.bin": b"{}", "empty": b""}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.gguf").mkdir()
    are = {name for name in [*files, "folder.gguf", "none.gguf"] if is_gguf(tmp_path / name)}
    assert are == {"a.gguf", "sha256-1f"}
    assert check_folder(str(tmp_path / "sha256-1f")) == tmp_path / "sha256-1f"
    with pytest.raises(ModelLoadError, match="is a file"):
        check_folder(str(tmp_path / "model.bin"))
