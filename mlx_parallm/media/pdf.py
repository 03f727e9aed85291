"""From a PDF file to its pages, as texts or images, by a process for each file."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_parallm.fairness import Client, SharedBudget
from mlx_parallm.media.fetch import Fetcher
from mlx_parallm.media.reader import RunInThread, naming, read_base64
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError

CHILD = Path(__file__).with_name("pdf_child.py")
# MAX_PAGES: of a file whose text is read, as at Anthropic.
MAX_PAGES = 100
# MAX_CHILDREN: files that are read at once.
MAX_CHILDREN = 2
# READ_S: most seconds until a file is read; a process has the processor less long.
READ_S = 60.0
# START, START_BYTES: the beginning of a file's first bytes, which junk may precede.
START, START_BYTES = b"%PDF-", 1024


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

    async def pages(self, content: str, *, is_url: bool, as_images: bool, param: str) -> list[str]:
        """Return the pages of a file: PNG files in base64, or texts.

        Args:
            content: the file in base64, or its URL.
            is_url: True if it is a URL.
            as_images: True for images, of which a request may have ``max_images``.
            param: the part of the request that has it.

        Raises:
            InvalidRequestError: it is not read; says why.
            OverloadedError: the process holds too many bytes of fetched files.
        """
        with naming(param):
            if find_spec("pypdfium2") is None:
                raise InvalidRequestError(
                    "PDF files need an extra on the server: pip install 'mlx-parallm[pdf]'.",
                    code="unsupported_parameter",
                )
            max_pages = min(MAX_PAGES, self._limits.max_images) if as_images else MAX_PAGES
            async with self._file(content, is_url) as data:
                if START not in data[:START_BYTES]:
                    raise InvalidRequestError("The file is no PDF file.")
                header = {
                    "as_images": as_images,
                    "max_pages": max_pages,
                    "max_pixels": self._limits.max_pixels,
                }
                async with self._places.acquired(1, self._client()):
                    answer = await self._read(json.dumps(header).encode() + b"\n" + data)
        if "error" in answer:
            raise InvalidRequestError(answer["error"], param=param)
        return answer["pages"]

    @asynccontextmanager
    async def _file(self, content: str, is_url: bool) -> AsyncGenerator[bytes]:
        if is_url:
            async with self._fetcher.fetched(content, self._client()) as data:
                yield data
        else:
            yield await self._in_thread(lambda: read_base64(content, self._limits))

    async def _read(self, request: bytes) -> dict[str, Any]:
        """Return the answer of a new process."""
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(CHILD), stdin=pipe, stdout=pipe, stderr=none
        )
        try:
            async with asyncio.timeout(READ_S):
                answer, _ = await child.communicate(request)
        except TimeoutError:
            raise InvalidRequestError("The PDF file takes too long to read.") from None
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode:
            raise InvalidRequestError("The PDF file takes too much time or memory to read.")
        return await self._in_thread(lambda: json.loads(answer))
