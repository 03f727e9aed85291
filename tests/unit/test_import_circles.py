"""No module and no folder of the package imports itself over others, not even for types.

import-linter's contracts (`pyproject.toml`) leave out imports under ``TYPE_CHECKING``, because
processes without MLX name types of those with it. A circle of such imports runs, but neither side
can be read, or moved to a folder of its own, without the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

PACKAGE = "mlx_parallm"


def circles(package: str) -> Iterator[str]:
    """Yield a circle for each folder in which there is any, as "a -> b -> a"."""
    imports = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
    # The parts of each folder, which are modules and folders, and what they import of it.
    graphs: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for importer in imports.modules:
        for imported in imports.find_modules_directly_imported_by(importer):
            folder, part, other = diverging(importer, imported)
            if folder:
                graphs[folder][part].add(other)
    for graph in graphs.values():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as circle:
            # It lists what is imported before what imports it.
            yield " -> ".join(reversed(circle.args[1]))


def diverging(importer: str, imported: str) -> tuple[str, str, str]:
    """Return the innermost folder of two modules, and the part of it that each is in.

    All are empty if one module is the folder of the other: a package may import its own modules.
    """
    own, other = importer.split("."), imported.split(".")
    for depth, (name, another) in enumerate(zip(own, other, strict=False)):
        if name != another:
            return ".".join(own[:depth]), ".".join(own[: depth + 1]), ".".join(other[: depth + 1])
    return "", "", ""


def test_the_package_has_no_circle() -> None:
    assert list(circles(PACKAGE)) == []


@pytest.mark.parametrize(
    ("modules", "circle"),
    [
        ({"a": "from {} import b", "b": ""}, None),
        ({"a": "from {} import b", "b": "from {} import a"}, ("a", "b")),
        (
            {
                "a": "from {} import b",
                "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {}.a import C",
            },
            ("a", "b"),
        ),
        ({"a": "from {} import b", "b": "def load():\n    from {} import a"}, ("a", "b")),
        # No module imports itself over others, but the folders do.
        ({"x.a": "import {}.y.b", "x.c": "", "y.b": "", "y.d": "import {}.x.c"}, ("x", "y")),
    ],
)
def test_planted(
    modules: dict[str, str],
    circle: tuple[str, str] | None,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The interpreter keeps what it has imported by name.
    package = f"planted_{abs(hash(request.node.name))}"
    for name, source in modules.items():
        path = (tmp_path / package).joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.format(package) if "{}" in source else source)
        for folder in path.parents:
            if folder == tmp_path:
                break
            (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    lines = list(circles(package))
    if circle is None:
        assert lines == []
    else:
        assert [set(line.split(" -> ")) for line in lines] == [
            {f"{package}.{part}" for part in circle}
        ]
