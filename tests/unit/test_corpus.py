"""The tools of ``make corpus``."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests import compatibility_page as page
from tests.conformance.report import Outcome
from tests.corpus import fetch, newest
from tests.corpus.sources import Source

FILES = {
    "pack-1.0/chat/a.jinja": b"a",
    "pack-1.0/chat/deep/b.jinja": b"b",
    "pack-1.0/chat/c.py": b"c",
    "pack-1.0/../../chat/d.jinja": b"d",
    "pack-1.0//chat/e.jinja": b"e",
}


@pytest.fixture(params=["json", "html"])
def source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Source:
    """Return a source whose archive is on an index of files."""
    archive = tmp_path / "pack-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in FILES.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("pack-1.0/chat/f.jinja")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    index, url = tmp_path / "index", archive.as_uri()
    if request.param == "json":
        index.write_text(json.dumps({"files": [{"filename": archive.name, "url": url}]}))
    else:
        index.write_text(f'<a href="{url}#sha256=0">{archive.name}</a><br/>')
    monkeypatch.setattr(fetch, "project_page", lambda name: index.as_uri())
    monkeypatch.setenv("MLX_PARALLM_CORPUS", str(tmp_path / "cache"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return Source(name="pack", version="1.0", sha256=digest, members=("chat/*.jinja",))


def test_only_chosen_plain_files_are_unpacked(source: Source) -> None:
    folder = fetch.unpacked(source)
    assert [file.relative_to(folder) for file in folder.rglob("*.*")] == [Path("chat/a.jinja")]
    assert list(fetch.cache_folder().iterdir()) == [folder]
    assert fetch.unpacked(source) == folder


def test_other_members_are_unpacked_anew(source: Source) -> None:
    fetch.unpacked(source)
    folder = fetch.unpacked(replace(source, members=("chat/*.py",)))
    assert (folder / "chat" / "c.py").read_bytes() == b"c"


def test_an_archive_of_another_digest_is_refused(source: Source) -> None:
    with pytest.raises(ValueError, match="not the pinned"):
        fetch.unpacked(replace(source, sha256="0" * 64))
    assert not list(fetch.cache_folder().iterdir())


def test_each_run_rewrites_its_own_part_of_the_page() -> None:
    text = page.with_clients("# Old\n\n## Trainers\n\nthese\n", "# New\n\n## Skipped\n")
    assert text == "# New\n\n## Skipped\n\n## Trainers\n\nthese\n"
    text = page.with_section(text, page.NEWEST, "two\n")
    text = page.with_section(text, page.CORPUS, "one\n")
    text = page.with_section(text, page.TRAINERS, "those\n")
    assert [page.section(text, name).strip() for name in page.SECTIONS] == ["those", "one", "two"]
    assert text.startswith("# New\n\n## Skipped\n\n## Trainers\n")
    assert page.with_section(text, page.CORPUS, "one") == text


def test_an_architecture_is_known_by_its_path() -> None:
    known = newest.paths(newest.MODELS.read_text())
    assert known["llama"] == "packed"
    assert len(known) > 100
    row = "| architecture | path |\n| x | split (rows) | 1e-06 |  |\n## Over ranks\n| y | packed |"
    assert newest.paths(row) == {"x": "split (rows)"}


def test_what_broke_is_named() -> None:
    tests = [Outcome("a", "", "passed"), *(Outcome(f"t{n}", "", "failed") for n in range(9))]
    text = newest.section({"parity": tests}, {"mlx": "9.9"}, {"mlx": "0.32.4"})
    assert "| mlx | 0.32.4 | 9.9 |" in text
    assert "| parity | 1 | 9 | `t0`," in text
    assert "`t7` and 1 more |" in text
    assert set(newest.pinned()) >= set(newest.PACKAGES)


def test_architectures_are_tried_only_with_another_mlx() -> None:
    pins = {"mlx": "1", "mlx-lm": "1", "transformers": "1"}
    names = [suite.name for suite in newest.suites_for(pins | {"transformers": "2"}, pins)]
    assert "architectures" not in names
    names = [suite.name for suite in newest.suites_for(pins | {"mlx-lm": "2"}, pins)]
    assert "architectures" in names
