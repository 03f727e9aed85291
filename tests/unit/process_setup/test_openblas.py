"""OpenBLAS takes the place of MLX's BLAS on Linux, and nobody else's code is loaded."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.process_setup import openblas
from mlx_parallm.process_setup.openblas import (
    OpenBlasError,
    cached_copy,
    check_private,
    dynamic_names,
    file_name,
    make_copy,
    package_library,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a Mac has Accelerate")

# USED: prints what a process multiplies with, and whether a product, a decomposition and a
# product in a forked child are right.
USED = """
import json, os
from mlx_parallm.process_setup.blas import blas_in_use
import mlx.core as mx
import numpy as np
from dataclasses import asdict

def is_right():
    a, b = np.random.default_rng(0).normal(size=(2, 96, 96)).astype(np.float32)
    with mx.stream(mx.cpu):
        product = np.array(mx.array(a) @ mx.array(b))
        inverse = np.array(mx.linalg.inv(mx.array(a)))
    is_inverse = np.allclose(inverse @ a, np.eye(96), atol=1e-2)
    return is_inverse and np.allclose(product, a @ b, atol=1e-3)

# MLX itself computes only in children of a process that has not computed yet.
child = os.fork()
if child == 0:
    os._exit(int(not is_right()))
right = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and is_right()
print(json.dumps(asdict(blas_in_use()) | {"is_right": bool(right)}))
"""
PREPARE = """
from mlx_parallm.process_setup.device_process import prepare_device_process
prepare_device_process()
"""


def run(code: str, **variables: str) -> tuple[dict[str, Any], str]:
    """Return what a process printed as JSON, and its errors."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment | variables,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "mlx_parallm" / "openblas"
    return cached_copy(folder, file_name())


def test_a_process_computes_with_the_cached_file(copy: Path) -> None:
    cache = str(copy.parent.parent.parent)
    used, errors = run(PREPARE + USED, XDG_CACHE_HOME=cache, OPENBLAS_NUM_THREADS="2")
    assert used.pop("name").startswith("OpenBLAS 0.3.")
    assert used == {"path": str(copy), "is_slow": False, "is_right": True}
    assert errors == ""


def test_a_second_call_says_nothing(copy: Path) -> None:
    cache = str(copy.parent.parent.parent)
    _, errors = run(PREPARE + USED + PREPARE, XDG_CACHE_HOME=cache)
    assert errors == ""


@pytest.mark.parametrize("reason", ["cannot be written", "is open to others", "has no file"])
def test_without_the_cache_a_temporary_file_is_loaded(
    copy: Path, tmp_path: Path, reason: str
) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    folder = cache / "mlx_parallm" / "openblas"
    if reason == "cannot be written":
        # Root cannot make a folder there either.
        cache = Path("/proc/self/none")
    elif reason == "is open to others":
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        (folder / copy.name).write_bytes(copy.read_bytes())
    else:
        folder.mkdir(parents=True, mode=0o700)
        (folder / copy.name).write_bytes(b"cut")
    used, errors = run(PREPARE + USED, XDG_CACHE_HOME=str(cache), TMPDIR=str(temporary))
    assert used["name"].startswith("OpenBLAS")
    assert used["path"].startswith(str(temporary))
    assert used["is_right"]
    assert errors == ""
    assert list(temporary.iterdir()) == []


def test_an_mlx_that_is_imported_already_keeps_its_blas_and_a_warning_says_so(copy: Path) -> None:
    cache = str(copy.parent.parent.parent)
    used, errors = run("import mlx.core\n" + PREPARE + USED, XDG_CACHE_HOME=cache)
    assert used["name"] == "reference BLAS"
    assert used["is_slow"]
    assert "MLX was imported before OpenBLAS" in errors


def test_a_preloaded_blas_wins(copy: Path, tmp_path: Path) -> None:
    used, errors = run(PREPARE + USED, XDG_CACHE_HOME=str(tmp_path), LD_PRELOAD=str(copy))
    assert used["path"] == str(copy)
    assert used["is_right"]
    assert errors == ""
    assert not list(tmp_path.iterdir())


def test_without_the_packages_mlx_keeps_its_blas_and_the_start_log_warns(tmp_path: Path) -> None:
    code = (
        "from mlx_parallm.process_setup import openblas\n"
        "openblas.PACKAGE = 'no-such-package'\n"
        f"{PREPARE}{USED}{PREPARE}"
        "from mlx_parallm.worker.device.properties import log_blas\n"
        "log_blas()"
    )
    used, errors = run(code, XDG_CACHE_HOME=str(tmp_path))
    assert used["is_slow"]
    assert used["is_right"]
    assert "many times slower than OpenBLAS" in errors
    assert len(errors.splitlines()) == 1


def test_a_copy_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    code = (
        "from mlx_parallm.process_setup import openblas\n"
        f"openblas.OWN_NAME = 'libother-*'\n{PREPARE}{USED}"
    )
    used, errors = run(code, XDG_CACHE_HOME=str(tmp_path))
    assert used["is_right"]
    assert "OpenBLAS cannot be loaded for MLX" in errors
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("size", [0, 50, 63, 5_000, 1_000_000])
def test_a_library_that_cannot_be_read_is_one_warning(tmp_path: Path, size: int) -> None:
    cut = tmp_path / "cut.so"
    cut.write_bytes(package_library().read_bytes()[:size])
    with pytest.raises(OpenBlasError, match="cannot be read"):
        dynamic_names(cut.read_bytes())
    code = (
        "from pathlib import Path\n"
        "from mlx_parallm.process_setup import openblas\n"
        f"openblas.package_library = lambda: Path({str(cut)!r})\n{PREPARE}{USED}{PREPARE}"
    )
    used, errors = run(code, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert used["is_slow"]
    assert "OpenBLAS cannot be loaded for MLX: the library cannot be read" in errors
    assert len(errors.splitlines()) == 1


def test_what_is_no_library_is_refused() -> None:
    with pytest.raises(OpenBlasError, match="ELF"):
        dynamic_names(bytes(100))


def test_other_libraries_keep_their_own_functions(copy: Path) -> None:
    """Look into the global scope, where a library would take the calls of every other one."""
    code = (
        f"{PREPARE}"
        "import ctypes, json\n"
        "print(json.dumps({'global': hasattr(ctypes.CDLL(None), 'cblas_sgemm')}))"
    )
    assert run(code, XDG_CACHE_HOME=str(copy.parent.parent.parent))[0] == {"global": False}


def test_threads_are_counted_when_the_process_starts(copy: Path) -> None:
    code = (
        f"{PREPARE}"
        "import ctypes\n"
        "from mlx_parallm.process_setup.openblas import cache_folder, file_name\n"
        "print(ctypes.CDLL(str(cache_folder() / file_name())).openblas_get_num_threads())"
    )
    cache = str(copy.parent.parent.parent)
    assert run(code, XDG_CACHE_HOME=cache, OPENBLAS_NUM_THREADS="1")[0] == 1


def test_the_copy_has_plain_names(copy: Path) -> None:
    before = set(dynamic_names(package_library().read_bytes()))
    after = set(dynamic_names(copy.read_bytes()))
    assert len(before) > 5_000
    assert after == {name.removeprefix(b"scipy_") for name in before}
    assert hasattr(ctypes.CDLL(str(copy)), "dgesv_")


def test_the_file_is_named_after_both_packages() -> None:
    for package in ("scipy-openblas32", "mlx-cpu"):
        assert importlib.metadata.version(package) in file_name()


def test_several_threads_make_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads lock against each other as processes do: each opens the lock's file."""
    made: list[Path] = []

    def note(target: Path) -> None:
        made.append(target)
        target.write_bytes(b"library")

    monkeypatch.setattr(openblas, "make_copy", note)
    folder = tmp_path / "openblas"
    threads = [threading.Thread(target=cached_copy, args=(folder, "a.so")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["a.so", "lock"]


def test_a_failure_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: Path) -> None:
        target.write_bytes(b"half")
        raise OpenBlasError("no")

    monkeypatch.setattr(openblas, "make_copy", fail)
    with pytest.raises(OpenBlasError):
        cached_copy(tmp_path / "openblas", "a.so")
    assert [path.name for path in (tmp_path / "openblas").iterdir()] == ["lock"]


@pytest.mark.parametrize("mode", [0o770, 0o750, 0o701, 0o707])
def test_a_folder_with_rights_for_others_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(OpenBlasError, match="0700"):
        check_private(tmp_path)


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    check_private(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(OpenBlasError, match="of this user"):
        check_private(tmp_path)


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OpenBlasError, match="of this user"):
        check_private(tmp_path / "link")


def test_the_program_runs_a_module_with_it(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "used.py").write_text("import sys; assert sys.argv[1:] == ['-n', '5']\n" + USED)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-m", "mlx_parallm.process_setup.openblas", "used", "-n", "5"],
        capture_output=True,
        text=True,
        env={
            **environment,
            "PYTHONPATH": str(tmp_path),
            "XDG_CACHE_HOME": str(copy.parent.parent.parent),
        },
        check=True,
    )
    assert json.loads(done.stdout)["path"] == str(copy)


def test_the_program_alone_makes_the_file(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "mlx_parallm.process_setup.openblas"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        check=True,
    )
    made = tmp_path / "mlx_parallm" / "openblas" / file_name()
    assert made.stat().st_size > 10_000_000
    assert made.parent.stat().st_mode & 0o777 == 0o700


def test_an_mlx_that_needs_another_blas_gets_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openblas, "OWN_NAME", "libother-*")
    with pytest.raises(OpenBlasError, match="no library"):
        make_copy(tmp_path / "copy.so")
