"""PDF files become pages, within the limits of a process for each."""

from __future__ import annotations

import asyncio
import importlib.util
import io
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mlx_parallm.media import pdf
from mlx_parallm.media.child import process
from mlx_parallm.media.child.pdf import SIDE
from mlx_parallm.media.fetch import Fetcher
from mlx_parallm.media.pdf import MAX_PAGES, PdfReader, PdfRoom
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError, OverloadedError
from tests.pdf_files import bomb, encrypted, looped, pdf_of

SCRIPT = b"/OpenAction << /S /JavaScript /JS (while(true){}) >>"


def reader() -> PdfReader:
    limits = MediaLimits()
    return PdfReader(limits, Fetcher(limits), in_thread=asyncio.to_thread, client=lambda: None)


async def read(data: bytes, *, as_images: bool = False, room: PdfRoom | None = None) -> list[str]:
    content = b64encode(data).decode()
    room = room or PdfRoom(16 if as_images else MAX_PAGES, 100_000)
    return await reader().pages(content, is_url=False, as_images=as_images, room=room, param="here")


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (pdf_of("Hello world", "", "two"), ["Hello world", "", "two"]),
        (b"junk\n" + pdf_of("Hello"), ["Hello"]),
        (pdf_of("scripts are not run", catalog=SCRIPT), ["scripts are not run"]),
    ],
)
async def test_the_text_of_pages_is_read(data: bytes, texts: list[str]) -> None:
    assert await read(data) == texts


@pytest.mark.parametrize("size", [(612, 792), (1_000_000, 500_000)])
async def test_pages_become_images_of_bounded_size(size: tuple[int, int]) -> None:
    (page,) = await read(pdf_of("", size=size, red=True), as_images=True)
    with Image.open(io.BytesIO(b64decode(page))) as image:
        assert max(image.size) <= SIDE
        assert abs(image.width / image.height - size[0] / size[1]) < 0.01
        assert image.getpixel((image.width // 2, image.height // 2)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no PDF file"),
        (b"PK\x03\x04" + bytes(99), "no PDF file"),
        (b"<html></html>", "no PDF file"),
        (b"%PDF-1.4 not really a pdf", "damaged"),
        (pdf_of("Hello")[:300], "damaged"),
        (pdf_of(), "damaged"),
        (looped(), "damaged"),
        (encrypted(), "encrypted with a password"),
        (pdf_of(*["x"] * 101), "101 pages; at most 100"),
    ],
)
async def test_a_bad_file_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        await read(data)
    assert caught.value.param == "here"


@pytest.mark.slow
@pytest.mark.parametrize("as_images", [False, True])
async def test_a_bomb_ends_its_own_process_only(as_images: bool) -> None:
    with pytest.raises(InvalidRequestError, match="too much time or memory"):
        await read(bomb(3 * 2**29), as_images=as_images)
    with pytest.raises(InvalidRequestError, match="10000 pages"):
        await read(pdf_of(*["x"] * 10_000), as_images=as_images)
    assert len(await read(pdf_of("a"), as_images=as_images)) == 1


@pytest.mark.parametrize("as_images", [False, True])
async def test_files_of_a_request_have_one_bound_of_pages(as_images: bool) -> None:
    room = PdfRoom(16, 100)
    for left in (9, 2):
        await read(pdf_of(*["x"] * 7), as_images=as_images, room=room)
        assert room.pages == left
    with pytest.raises(InvalidRequestError, match=r"3 pages; at most 2 .* other files"):
        await read(pdf_of(*["x"] * 3), as_images=as_images, room=room)


async def test_texts_of_a_request_have_one_bound_of_characters() -> None:
    room = PdfRoom(MAX_PAGES, 100)
    await read(pdf_of("a" * 60, "b" * 30), room=room)
    assert room.chars == 10
    with pytest.raises(InvalidRequestError, match="too large together"):
        await read(pdf_of("c" * 11), room=room)


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", InvalidRequestError, "memory"),
        ("import os; os._exit(3)", InvalidRequestError, "memory"),
        ("import nothing_that_is_there", RuntimeError, "nothing_that_is_there"),
    ],
)
async def test_only_the_files_own_failures_are_its_fault(
    program: str,
    kind: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "pdf.py").write_text(program)
    monkeypatch.setattr(process, "READERS", tmp_path)
    with pytest.raises(kind, match=words):
        await read(pdf_of("Hello"))


async def test_a_busy_machine_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "READ_S", 0.0)
    with pytest.raises(OverloadedError, match="try again"):
        await read(pdf_of("Hello"))


async def test_the_refusal_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(pdf, "find_spec", lambda name: None if "pdf" in name else known(name))
    with pytest.raises(InvalidRequestError, match=r"mlx-parallm\[pdf\]"):
        await read(pdf_of("Hello"))


async def test_a_request_that_goes_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
    begin = asyncio.create_subprocess_exec

    async def note(*arguments: str, **options: Any) -> asyncio.subprocess.Process:
        # A program that reads its input, and never answers.
        program = [arguments[0], "-c", "import sys, time; sys.stdin.read(); time.sleep(1e6)"]
        child = await begin(*program, **options)
        started.put_nowait(child)
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", note)
    reading = asyncio.ensure_future(read(pdf_of("Hello")))
    child = await started.get()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert child.returncode is not None
