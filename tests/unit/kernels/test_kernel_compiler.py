"""Kernels are compiled at the same time, each once, and not again by later processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mlx_parallm.kernels.compiler import CompilationError, KernelCompiler
from mlx_parallm.kernels.store import KernelStore

TIMEOUT_S = 60


class Fake:
    """Compiles by reversing a source, and records its calls."""

    def __init__(self) -> None:
        self.sources: list[str] = []

    def __call__(self, source: str, name: str) -> bytes:
        self.sources.append(source)
        if source == "wrong":
            raise CompilationError(f"{name}: expected a semicolon")
        return source[::-1].encode()


def compiler_in(
    folder: Path, compile_source: Fake, identity: str = "13.5 sm_90a"
) -> KernelCompiler:
    return KernelCompiler(compile_source, identity, KernelStore(folder), threads=4)


def test_a_source_is_compiled_once_and_found_by_the_next_process(tmp_path: Path) -> None:
    fake = Fake()
    first = compiler_in(tmp_path, fake)
    assert [first.code("abc", "k") for _ in range(2)] == [b"cba"] * 2
    assert (first.counts.compiled, first.counts.kept) == (1, 0)
    second = compiler_in(tmp_path, fake)
    assert second.code("abc", "k") == b"cba"
    assert (second.counts.compiled, second.counts.kept) == (0, 1)
    assert fake.sources == ["abc"]


@pytest.mark.parametrize("identity", ["13.5 sm_80", "13.6 sm_90a"])
def test_another_gpu_or_compiler_has_kernels_of_its_own(tmp_path: Path, identity: str) -> None:
    fake = Fake()
    compiler_in(tmp_path, fake).code("abc", "k")
    compiler_in(tmp_path, fake, identity).code("abc", "k")
    assert fake.sources == ["abc", "abc"]


def test_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    fake = Fake()
    compiler_in(tmp_path, fake).code("abc", "k")
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert compiler_in(tmp_path, fake).code("abc", "k") == b"cba"
    assert compiler_in(tmp_path, fake).code("abc", "k") == b"cba"
    assert fake.sources == ["abc", "abc"]


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    fake = Fake()
    compiler = compiler_in(tmp_path / "file", fake)
    assert compiler.code("abc", "k") == b"cba"
    assert compiler.code("abc", "k") == b"cba"
    assert fake.sources == ["abc"]


def test_kernels_are_compiled_at_the_same_time(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def compile_source(source: str, name: str) -> bytes:
        together.wait(TIMEOUT_S)
        return source.encode()

    compiler = KernelCompiler(compile_source, "", KernelStore(tmp_path), threads=4)
    sources = [f"source {number}" for number in range(4)]
    for source in sources:
        compiler.begin(source, "k")
    assert [compiler.code(source, "k") for source in sources] == [
        source.encode() for source in sources
    ]


def test_a_wrong_source_is_told_to_whoever_asks(tmp_path: Path) -> None:
    compiler = compiler_in(tmp_path, Fake())
    compiler.begin("wrong", "k")
    for _ in range(2):
        with pytest.raises(CompilationError, match="semicolon"):
            compiler.code("wrong", "k")
    assert compiler.code("right", "k") == b"thgir"


def test_those_who_wait_see_how_far_it_is(tmp_path: Path) -> None:
    reported, seen = threading.Event(), list[tuple[int, int]]()

    def compile_source(source: str, name: str) -> bytes:
        assert source == "quick" or reported.wait(TIMEOUT_S)
        return source.encode()

    def watch(done: int, total: int) -> None:
        seen.append((done, total))
        reported.set()

    compiler = KernelCompiler(compile_source, "", KernelStore(tmp_path), threads=2)
    compiler.watch(watch)
    compiler.code("quick", "k")
    compiler.begin("slow", "k")
    compiler.begin("slower", "k")
    assert compiler.code("slow", "k") == b"slow"
    assert compiler.code("slower", "k") == b"slower"
    assert {total for _, total in seen} == {2}
    assert seen == sorted(seen)
