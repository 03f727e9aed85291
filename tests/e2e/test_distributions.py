"""The sdist and the wheel: they are complete, and what is installed from them serves."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import httpx2
import openai
import pytest
from packaging.requirements import Requirement

from mlx_parallm import __version__
from mlx_parallm.api.http.listener import bind
from tests.server_process import PATIENT, POOL, ROOT, user_environment

pytestmark = pytest.mark.slow
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--quiet", "--no-index", "--no-deps")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what ``make dist`` builds."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True)
    (sdist,) = folder.iterdir()
    wheel = [*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", str(folder), str(sdist)]
    subprocess.run(wheel, cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (file,) = dist.glob("*.whl")
    return file


def tracked() -> set[str]:
    """Return the files of the package that git knows."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "mlx_parallm"]
    text = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return set(text.splitlines())


def test_both_have_every_file_of_the_package(dist: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"mlx_parallm-{__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == tracked()
    assert {Path(name).suffix for name in names} >= {".cu", ".metal", ".safetensors", ".html"}
    assert "mlx_parallm/py.typed" in names
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert packed >= tracked() | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"}
    assert not any(name.startswith(("tests", "docs")) for name in packed)


def test_the_metadata_are_those_of_the_project(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    read = {Path(name).name: archive.read(name).decode() for name in archive.namelist()[-5:]}
    metadata = Parser().parsestr(read["METADATA"])
    assert (metadata["Name"], metadata["Version"]) == ("mlx-parallm", __version__)
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {Requirement(text) for text in metadata.get_all("Requires-Dist", [])}
    needed = {each for each in needed if "extra" not in str(each.marker)}
    assert {canonical(each) for each in needed} == {
        canonical(Requirement(text)) for text in project["dependencies"]
    }
    for name in ("mlx_parallm", "mlx-parallm"):
        assert f"{name} = mlx_parallm.cli.main:main" in read["entry_points.txt"]


def canonical(requirement: Requirement) -> tuple[str, str]:
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    return name, str(requirement.specifier)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the commands of an environment with the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    install = [*PIP, "--python", str(python), "install", *OFFLINE, str(wheel)]
    subprocess.run(install, cwd=folder, check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


@pytest.fixture
def url(installed: Path, tmp_path: Path) -> Iterator[str]:
    environment = {**user_environment(), **POOL, **PATIENT}
    environment.pop("PYTHONPATH", None)
    environment["MLX_PARALLM_DATA_DIR"] = str(tmp_path / "data")
    command = [str(installed / "python"), str(installed / "mlx_parallm"), "serve", "--fd"]
    with (tmp_path / "log").open("w") as log, bind("127.0.0.1", 0) as listener:
        # Connections wait for the process, and end with it.
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        fd = listener.fileno()
        process = subprocess.Popen(
            [*command, str(fd)],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            env=environment,
            pass_fds=[fd],
        )
    try:
        httpx2.get(f"{url}/health", timeout=None).raise_for_status()
        yield url
    finally:
        process.terminate()
        process.wait()


def test_what_is_installed_serves(installed: Path, url: str) -> None:
    where = [str(installed / "python"), "-c", "import mlx_parallm; print(mlx_parallm.__file__)"]
    printed = subprocess.run(where, cwd="/", env={}, check=True, capture_output=True, text=True)
    assert printed.stdout.startswith(str(installed.parent))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="mlx-parallm-demo",
            messages=[{"role": "user", "content": "What is 17 + 25?"}],
            temperature=0,
        )
    assert answer.choices[0].message.content == "17 + 25 = 42"
    assert "<title>" in httpx2.get(url).text
