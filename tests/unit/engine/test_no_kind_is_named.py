"""``engine/`` serves every kind of model, so its source names none."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlx_parallm.engine
from mlx_parallm.serving.kinds import KINDS

ENGINE = Path(mlx_parallm.engine.__file__).parent
# Words for kinds of models and for what they do; a prefix stands for all words that begin so.
WORDS = (
    *(kind.traits.name for kind in KINDS),
    *("generator", "generates", "pooled", "encoder", "decoder", "embed", "classif", "rerank"),
    *("reward", "logits", "masked_lm"),
)
# PYTHONS: names of Python's own types.
PYTHONS = {"Generator", "AsyncGenerator"}
_NAMED = re.compile("|".join(WORDS), re.IGNORECASE)


def words_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every name, literal and comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        yield token.start[0], token.string


def named_kinds(source: str) -> list[str]:
    return [
        f"{line}: {text}"
        for line, text in words_of(source)
        if _NAMED.search(text) and text not in PYTHONS
    ]


def imported(source: str) -> set[str]:
    """Return the modules that a file imports, for types only ones included."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules


FILES = sorted(ENGINE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ENGINE)) for path in FILES])
def test_no_kind_is_named(path: Path) -> None:
    assert named_kinds(path.read_text()) == []


def test_no_kind_is_imported_not_even_for_types() -> None:
    packages = ("generation", "pooling", "serving", "api")
    modules = {module for path in FILES for module in imported(path.read_text())}
    parts = [module.split(".") for module in modules if module.startswith("mlx_parallm.")]
    assert not [part for part in parts if part[1] in packages or "pooling" in part]


@pytest.mark.parametrize(
    "source",
    [
        "max_encoder_bytes = 1\n",
        "x = config.PoolingModel\n",
        "# Of an encoder, requests.\n",
        'raise ValueError(f"{name} is an encoder")\n',
        '"""Models that generate: Generation."""\n',
    ],
)
def test_names_are_found_wherever_they_stand(source: str) -> None:
    assert named_kinds(source)
