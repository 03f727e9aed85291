"""``GET /docs`` and ``/openapi.json``: the API's documentation, without files of other servers."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from fastapi import Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.page.routes import browser_headers

ASSETS = "/docs/assets"
# FOLDED: groups of operations and the list of schemas are closed at first.
FOLDED = {"docExpansion": "none", "defaultModelsExpandDepth": 0}

# POLICY: Swagger UI styles its elements, and has its icons in its style sheet.
POLICY = {
    "style-src": "'self' 'unsafe-inline'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
}
INLINE = re.compile(rb"<script>(.*?)</script>", re.DOTALL)

routes = Routes(SERVER, access=Access.OPEN)


@routes.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    """Return the OpenAPI document."""
    document, base = request.app.openapi(), _base(request)
    content = {**document, "servers": [{"url": base}]} if base else document
    return JSONResponse(content, headers=browser_headers())


@routes.get("/docs", include_in_schema=False)
async def documentation(request: Request) -> HTMLResponse:
    """Show Swagger UI for ``/openapi.json``."""
    base = _base(request)
    page = get_swagger_ui_html(
        openapi_url=f"{base}/openapi.json",
        title="mlx_parallm",
        swagger_js_url=f"{base}{ASSETS}/swagger-ui-bundle.js",
        swagger_css_url=f"{base}{ASSETS}/swagger-ui.css",
        swagger_favicon_url=f"{base}{ASSETS}/favicon-32x32.png",
        swagger_ui_parameters=FOLDED,
    )
    page.headers.update(browser_headers(POLICY | {"script-src": _own_scripts(bytes(page.body))}))
    return page


@routes.get(ASSETS + "/{path:path}", include_in_schema=False, is_polled=True)
async def asset(path: str, request: Request) -> Response:
    """Return a file of Swagger UI."""
    folder = StaticFiles(directory=str(files("fastapi_swagger") / "resources"))
    answer = await folder.get_response(path, request.scope)
    answer.headers.update(browser_headers())
    return answer


def _own_scripts(page: bytes) -> str:
    """Return the sources of a page's scripts: this server, and the scripts within the page."""
    digests = (sha256(script).digest() for script in INLINE.findall(page))
    return " ".join(["'self'", *(f"'sha256-{b64encode(digest).decode()}'" for digest in digests)])


def _base(request: Request) -> str:
    """Return the prefix of paths for browsers (``--root-path``)."""
    return request.scope.get("root_path", "").rstrip("/")
