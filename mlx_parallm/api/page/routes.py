"""``GET /``: a page that shows the server and tries its models; its parts are at ``/page/``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import PurePath

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes

# NOTHING: what no document of this server needs (CSP Level 3).
NOTHING = {
    "default-src": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# POLICY: everything comes from this server, and no text can become markup or a script (Trusted
# Types), because the page shows texts of models.
POLICY = {
    "script-src": "'self'",
    "style-src": "'self'",
    # The playground shows images that people choose, as data: URLs.
    "img-src": "'self' data:",
    # It plays the recordings that they choose or make.
    "media-src": "blob:",
    "connect-src": "'self'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}


def browser_headers(policy: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the headers of an answer.

    Args:
        policy: the directives of its Content-Security-Policy besides those of ``NOTHING``.
    """
    directives = NOTHING | dict(policy or {})
    return {
        "content-security-policy": "; ".join(
            f"{name} {value}" for name, value in directives.items()
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        # The browser caches files but revalidates them, so that a new version shows at once.
        "cache-control": "no-cache",
    }


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page; ``etag`` is a digest of its content, as a wheel's files have no times."""

    content: bytes
    content_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Return the page's files by name."""
    page: dict[str, PageFile] = {}
    for file in (files("mlx_parallm.api.page") / "assets").iterdir():
        content_type = TYPES.get(PurePath(file.name).suffix)
        if content_type is not None:
            content = file.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            page[file.name] = PageFile(content, content_type, etag)
    return page


# The page's links are relative, so that it works below any prefix.
routes = Routes(SERVER, access=Access.OPEN)


@routes.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """Return the page itself, which asks for a key if the server needs one."""
    return _answer(request, page_files()[INDEX])


@routes.get("/page/{name}", include_in_schema=False, is_polled=True)
async def part(name: str, request: Request) -> Response:
    """Return a script, a style sheet or an image of the page."""
    if name not in page_files() or name == INDEX:
        raise HTTPException(404)
    return _answer(request, page_files()[name])


def _answer(request: Request, file: PageFile) -> Response:
    headers = browser_headers(POLICY) | {"etag": file.etag}
    known = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
    # A compressing proxy makes an entity tag weak.
    if file.etag in [tag.removeprefix("W/") for tag in known]:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.content_type)
