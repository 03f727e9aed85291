"""Expectations of vLLM's tests of its reasoning parsers, without vLLM: only tables are read.

Its test modules are imported with empty modules in the place of vLLM's own. Their tests do not run;
the outputs and expectations that they are parametrized with are plain values.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

from tests.corpus.absent import VLLM, AbsentPackages


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An output of a model, and what vLLM's parser makes of it.

    Attributes:
        module: the test module, without ``test_`` and ``_parser``.
        name: of the test, and the number of its case.
        text: what the model wrote.
        content: what the model said.
        reasoning: what it thought.
    """

    module: str
    name: str
    text: str
    content: str
    reasoning: str

    @property
    def id(self) -> str:
        """Return a name for it."""
        return f"{self.module}: {self.name}"


@contextmanager
def _without_packages(folder: Path) -> Iterator[None]:
    """Let imports find the folder's modules, and empty ones for absent packages."""
    before = dict(sys.modules)
    finder = AbsentPackages(VLLM)
    for name in before:
        if name.partition(".")[0] in VLLM:
            del sys.modules[name]
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)


def read_cases(folder: Path, modules: Collection[str]) -> list[Case]:
    """Return the cases of these modules, without repetition."""
    cases: dict[tuple[object, ...], Case] = {}
    with _without_packages(folder):
        for path in sorted(folder.glob("tests/*/test_*_parser.py")):
            short = path.stem.removeprefix("test_").removesuffix("_parser")
            if short not in modules:
                continue
            module = importlib.import_module(f"tests.{path.parent.name}.{path.stem}")
            for case in _cases_of(module, short):
                cases.setdefault((case.module, case.text), case)
    return list(cases.values())


def _cases_of(module: ModuleType, short: str) -> Iterator[Case]:
    for function in filter(inspect.isfunction, vars(module).values()):
        yield from _parametrized(function, short)


def _parametrized(function: FunctionType, short: str) -> Iterator[Case]:
    """Yield the cases of a test's tables."""
    for mark in getattr(function, "pytestmark", ()):
        rows = mark.args[1] if mark.name == "parametrize" and len(mark.args) > 1 else ()
        for number, row in enumerate(rows):
            # A row may be one of ``pytest.param``, which is a tuple too.
            values = getattr(row, "values", row)
            expected = values[1] if isinstance(values, tuple) and len(values) == 2 else None
            if isinstance(expected, Mapping) and isinstance(expected.get("output"), str):
                yield Case(
                    module=short,
                    name=f"{function.__name__} {number}",
                    text=expected["output"],
                    content=expected.get("content") or "",
                    reasoning=expected.get("reasoning") or "",
                )
