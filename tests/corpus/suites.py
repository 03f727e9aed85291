"""The suites that run over what others wrote: a file of tests each."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.corpus.sources import LLAMA_CPP, VLLM, Source

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: The environment of ``requirements/corpus.txt``: libraries that save folders. It has torch.
PINS = ROOT / "requirements" / "corpus.txt"
LIBRARIES = ROOT / ".venv-corpus" / "bin" / "python"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The tests of one file. They run in the environment of the tests.

    A test may record the properties ``case`` and ``outcome`` (``record_property``): the page has a
    table of them, and below it the sentences of the properties ``note``.

    Attributes:
        file: in this folder; the first line of its docstring describes it.
        sources: what it reads; fetched before it runs.
        writer: a module below ``tests.corpus.writers`` that is run in ``LIBRARIES`` before, with a
            new folder as its argument. Tests find the folder in ``CORPUS_WRITTEN``.
        packages: what the writer saves with, for the page.
        outcomes: the columns of the suite's table, in order; "failed" follows them.
    """

    file: str
    sources: tuple[Source, ...] = ()
    writer: str | None = None
    packages: tuple[str, ...] = ()
    outcomes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the file of its results."""
        return self.file.removesuffix(".py").removeprefix("test_")

    @property
    def origins(self) -> tuple[str, ...]:
        """Return the packages, with their versions."""
        pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", PINS.read_text(), re.MULTILINE))
        fetched = (f"{source.name} {source.version}" for source in self.sources)
        return (*fetched, *(f"{package} {pins[package]}" for package in self.packages))

    @property
    def in_sample(self) -> bool:
        """True if it needs no library that the tests' environment lacks."""
        return self.writer is None

    def command(self, results: Path) -> list[str]:
        """Return the command that runs it and writes its results as JUnit's XML."""
        settings = ["-q", "-c", str(HERE / "pytest.ini"), "--rootdir", str(ROOT)]
        return [
            *(sys.executable, "-m", "pytest", *settings),
            *(f"--junit-xml={results}", str(HERE / self.file)),
        ]


SUITES: tuple[Suite, ...] = (
    Suite(
        file="test_templates.py",
        sources=(LLAMA_CPP, VLLM),
        outcomes=("as it is", "adapted", "refused", "a part is lost", "has none"),
    ),
    Suite(
        file="test_gguf_vocabularies.py",
        sources=(LLAMA_CPP,),
        outcomes=("the same", "refused"),
    ),
    Suite(
        file="test_families.py",
        writer="families",
        packages=("transformers",),
        outcomes=("the same", "differs, with a warning", "refused"),
    ),
    Suite(
        file="test_reasoning.py", sources=(VLLM,), outcomes=("the same", "otherwise, on purpose")
    ),
    Suite(
        file="test_vllm_parsers.py", sources=(VLLM,), outcomes=("the same", "otherwise, on purpose")
    ),
    Suite(
        file="test_adapters.py",
        writer="adapters",
        packages=("peft", "transformers"),
        outcomes=("the same", "refused"),
    ),
    Suite(
        file="test_encoders.py",
        writer="encoders",
        packages=("sentence-transformers", "transformers"),
        outcomes=("the same",),
    ),
)
