"""``mlx_parallm kv``: what is in the folder of ``--kv-disk``, and its removal."""

from pathlib import Path

import pytest

from mlx_parallm.cli.main import main
from mlx_parallm.generation.kv_cache.disk.format import header_bytes
from mlx_parallm.units import readable_bytes
from tests.kv_disk import OWNER, Disk, chain, contents, data, read

OTHER = "cd" * 32
#: A file of a chain of five blocks.
FILE_BYTES = header_bytes(5) + 5 * 1000


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "kv")


def kv(what: str, disk: Disk) -> int:
    return main(["kv", what, "--kv-disk", str(disk.folder)])


def test_status_shows_each_model_beside_running_servers(
    disk: Disk, capsys: pytest.CaptureFixture[str]
):
    first, second = disk.open(), disk.open(owner=OTHER)
    disk.save(first, chain("a", 5))
    disk.save(first, chain("b", 5))
    disk.save(second, chain("c", 5))
    second.close()
    half = disk.files()[0]
    half.with_name(f"{half.name}.part").write_bytes(bytes(10))
    (disk.folder / "notes.txt").write_bytes(bytes(1000))
    assert kv("status", disk) == 0
    head, *models = capsys.readouterr().out.splitlines()
    assert head == (
        f"{disk.folder}: {readable_bytes(disk.num_bytes())} in 4 files; "
        "engines that write to it: 1 running, 1 ended"
    )
    assert {line.partition(" minutes")[0].partition(", used")[0] for line in models} == {
        f"  model {OWNER[:12]} (kv1): {readable_bytes(2 * FILE_BYTES)} in 2 files",
        f"  model {OTHER[:12]} (kv1): {readable_bytes(FILE_BYTES)} in 1 file",
        "  half: 10 bytes in 1 file",
    }
    assert len(disk.files()) == 4


def test_clear_removes_the_files_of_all_models_beside_a_running_server(
    disk: Disk, capsys: pytest.CaptureFixture[str]
):
    first, second = disk.open(), disk.open(owner=OTHER)
    blocks, waiting = chain("a", 5), chain("b", 5)
    disk.save(first, blocks)
    disk.save(second, blocks)
    second.close()
    (disk.folder / "notes.txt").write_bytes(bytes(1000))
    for block in waiting:
        first.put(block)
    assert kv("clear", disk) == 0
    assert capsys.readouterr().out == (
        f"removed {readable_bytes(2 * FILE_BYTES)} in 2 files from {disk.folder}\n"
    )
    assert disk.num_bytes() == 0
    assert (disk.folder / "notes.txt").exists()
    assert len([path for path in disk.folder.iterdir() if path.is_dir()]) == 1
    # The server does not find what is gone, and writes again.
    assert read(first, contents(blocks)) == []
    assert first.find(contents(blocks)) == 0
    disk.save(first, blocks)
    assert read(first, contents(blocks)) == data(blocks)
    assert read(first, contents(waiting)) == data(waiting)
    assert first.stats.used_bytes == disk.num_bytes()


@pytest.mark.parametrize("what", ["status", "clear"])
def test_a_folder_without_kv_is_left_as_it_is(
    disk: Disk, what: str, capsys: pytest.CaptureFixture[str]
):
    disk.folder.mkdir()
    (disk.folder / "notes.txt").write_bytes(bytes(1000))
    assert kv(what, disk) == 0
    assert "0 bytes in 0 files" in capsys.readouterr().out
    assert [path.name for path in disk.folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("what", ["status", "clear"])
@pytest.mark.parametrize("is_file", [True, False])
def test_what_is_no_folder_is_refused(
    disk: Disk, what: str, capsys: pytest.CaptureFixture[str], *, is_file: bool
):
    if is_file:
        disk.folder.write_bytes(b"")
    assert kv(what, disk) == 2
    assert f"--kv-disk: {disk.folder} is not a folder." in capsys.readouterr().err


def test_a_flag_or_a_subcommand_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]):
    for arguments, message in ((["kv"], "WHAT"), (["kv", "status"], "--kv-disk")):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert message in capsys.readouterr().err
