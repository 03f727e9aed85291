"""The report of ``doctor`` on the folder of ``--kv-disk``."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_parallm.cli.doctor.command import FAILED
from mlx_parallm.cli.doctor.kv_folder import (
    KVFolderReport,
    kv_folder_advice,
    kv_folder_report,
    kv_folder_text,
)
from mlx_parallm.cli.main import main
from mlx_parallm.config import CacheConfig

MIB = 1 << 20


@pytest.fixture
def no_room() -> Iterator[None]:
    """Let no file of this process become larger than 1 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def reported(folder: Path, limit_bytes: int = 20 << 30) -> KVFolderReport:
    report = kv_folder_report(CacheConfig(kv_disk=folder, kv_disk_bytes=limit_bytes))
    assert report is not None
    return report


def test_without_the_setting_there_is_no_report() -> None:
    assert kv_folder_report(CacheConfig()) is None
    assert kv_folder_advice(None) == []


def test_a_folder_is_created_measured_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    report = reported(folder, 16 * MIB)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []
    assert (report.refused, report.off, report.used_bytes) == (None, None, 0)
    assert report.read_gb_per_s is not None
    assert report.read_gb_per_s > 0
    assert kv_folder_advice(report) == []
    text = kv_folder_text(report)
    assert text.startswith(f"{folder}: 0 bytes of 16 MiB used, ")
    assert text.endswith(" GB/s")


def test_all_files_in_it_count(tmp_path: Path) -> None:
    (tmp_path / "writer").mkdir()
    (tmp_path / "writer" / "a.kv1").write_bytes(bytes(1000))
    (tmp_path / "lock").write_bytes(bytes(8))
    assert reported(tmp_path).used_bytes == 1008


def test_a_file_system_that_is_too_small_is_named(tmp_path: Path) -> None:
    report = replace(reported(tmp_path), used_bytes=MIB, free_bytes=2 * MIB)
    assert kv_folder_advice(report) == [
        "The file system of --kv-disk has room for 3 MiB, and --kv-disk-bytes is 20 GiB."
    ]


@pytest.mark.usefixtures("no_room")
def test_a_folder_that_cannot_be_written_says_that_it_is_off(tmp_path: Path) -> None:
    report = reported(tmp_path)
    assert (report.refused, report.off, report.read_gb_per_s) == (None, "File too large", None)
    assert kv_folder_text(report).endswith(" free, off: File too large")
    assert kv_folder_advice(report) == [f"--kv-disk keeps nothing: File too large ({tmp_path})."]
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_folder_fails_the_diagnosis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--kv-disk", __file__]) == FAILED
    folder = json.loads(capsys.readouterr().out)["kv_folder"]
    assert folder["refused"] == f"--kv-disk: {__file__} is not a folder."
    assert kv_folder_text(KVFolderReport(**folder)) == folder["refused"]
