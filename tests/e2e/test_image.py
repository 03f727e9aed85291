"""The settings of the image: all that a server of it writes is in its volume."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.slow
VOLUME = "/data"


def variables(volume: Path) -> dict[str, str]:
    """Return the image's variables with another folder for its volume."""
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    values = dict(re.findall(r"([A-Z_]+)=(\S+)", block))
    return {name: value.replace(VOLUME, str(volume), 1) for name, value in values.items()}


def files(folder: Path) -> set[Path]:
    return {file for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home folder with the cache that the image is built with."""
    cache = tmp_path / "home" / ".cache"
    cache.mkdir(parents=True)
    built = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx_parallm"
    if built.exists():
        (cache / "mlx_parallm").symlink_to(built)
    return cache.parent


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder


@pytest.fixture
def server(home: Path, volume: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(
        env=variables(volume) | {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    )
    process.wait_until_ready()
    yield process
    process.stop()


def test_everything_is_written_to_the_volume(
    server: ServerProcess, home: Path, volume: Path
) -> None:
    before = files(home)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        client.completions.create(model="mlx-parallm-demo", prompt="many words " * 200)
        client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    assert server.stop() == 0
    assert files(home) == before
    assert {path.name for path in volume.iterdir()} >= {"kv", "files"}
    assert files(volume / "kv")
