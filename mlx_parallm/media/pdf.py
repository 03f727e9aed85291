"""From a PDF file to its pages, as texts or images, by a process for each file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mlx_parallm.fairness import Client, SharedBudget
from mlx_parallm.media.child.process import command, header_of, is_ended_by_file
from mlx_parallm.media.fetch import Fetcher
from mlx_parallm.media.reader import RunInThread, naming, read_base64
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError, OverloadedError

# MAX_PAGES: of all files of a request, as at Anthropic.
MAX_PAGES = 100
# MAX_CHILDREN: files that are read at once.
MAX_CHILDREN = 2
# READ_S, CPU_S: most seconds until a file is read, and of them with the processor.
READ_S, CPU_S = 60.0, 20
# MAX_IMAGE_CHARS: characters of all pages of a file as images in base64.
MAX_IMAGE_CHARS = 32_000_000
# LOGGED: characters of a process's problems that are logged.
LOGGED = 2000
# START, START_BYTES: the beginning of a file's first bytes, which junk may precede.
START, START_BYTES = b"%PDF-", 1024


@dataclass(slots=True)
class PdfRoom:
    """The bounds that are left for the PDF files of a request.

    Attributes:
        pages: of all files.
        chars: of the texts of all files.
    """

    pages: int
    chars: int


class PdfReader:
    """Reads PDF files of requests, a few at a time; one client has half of the places."""

    def __init__(
        self,
        limits: MediaLimits,
        fetcher: Fetcher,
        *,
        in_thread: RunInThread,
        client: Callable[[], Client],
    ) -> None:
        """Prepare; see ``ImageReader``."""
        self._limits = limits
        self._fetcher = fetcher
        self._in_thread = in_thread
        self._client = client
        self._places = SharedBudget(MAX_CHILDREN)

    @property
    def max_images(self) -> int:
        """The most images of a request, those of pages included."""
        return self._limits.max_images

    async def pages(
        self, content: str, *, is_url: bool, as_images: bool, room: PdfRoom, param: str
    ) -> list[str]:
        """Return the pages of a file: PNG files in base64, or texts.

        Args:
            content: the file in base64, or its URL.
            is_url: True if it is a URL.
            as_images: True for images.
            room: what the request has left, of which the pages are taken.
            param: the part of the request that has it.

        Raises:
            InvalidRequestError: it is not read; says why.
            OverloadedError: the process holds too many bytes of fetched files, or has no time.
        """
        with naming(param):
            if find_spec("pypdfium2") is None:
                raise InvalidRequestError(
                    "PDF files need an extra on the server: pip install 'mlx-parallm[pdf]'.",
                    code="unsupported_parameter",
                )
            settings = {
                "as_images": as_images,
                "max_pages": room.pages,
                "max_pixels": self._limits.max_pixels,
                "max_chars": MAX_IMAGE_CHARS if as_images else room.chars,
            }
            answer = await self._answer(content, is_url, settings)
            if "error" in answer:
                raise InvalidRequestError(answer["error"])
        pages: list[str] = answer["pages"]
        room.pages -= len(pages)
        room.chars -= 0 if as_images else sum(map(len, pages))
        return pages

    async def _answer(self, content: str, is_url: bool, settings: dict[str, Any]) -> dict[str, Any]:
        if is_url:
            async with (
                self._fetcher.fetched(content, self._client()) as data,
                self._places.acquired(1, self._client()),
            ):
                return await self._read(settings, data)
        # Files that wait for a place are not decoded yet.
        async with self._places.acquired(1, self._client()):
            data = await self._in_thread(lambda: read_base64(content, self._limits))
            return await self._read(settings, data)

    async def _read(self, settings: dict[str, Any], data: bytes) -> dict[str, Any]:
        """Return the answer of a new process."""
        if START not in data[:START_BYTES]:
            raise InvalidRequestError("The file is no PDF file.")
        pipe = asyncio.subprocess.PIPE
        try:
            child = await asyncio.create_subprocess_exec(
                *command("pdf", CPU_S), stdin=pipe, stdout=pipe, stderr=pipe
            )
        except OSError as problem:
            raise OverloadedError("No process could be started for the PDF file.") from problem
        try:
            async with asyncio.timeout(READ_S):
                answer, problems = await child.communicate(header_of(len(data), **settings) + data)
        except TimeoutError:
            # It has used less than its processor time: others had the processors.
            raise OverloadedError("There was no time to read the PDF file; try again.") from None
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if is_ended_by_file(child.returncode):
            raise InvalidRequestError("The PDF file takes too much time or memory to read.")
        if child.returncode:
            shown = problems.decode(errors="replace")[-LOGGED:]
            raise RuntimeError(f"The reader of PDF files ended with {child.returncode}: {shown}")
        return await self._in_thread(lambda: json.loads(answer))
