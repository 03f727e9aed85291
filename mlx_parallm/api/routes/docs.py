"""``GET /docs``: the API's documentation, with every asset from this server."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

ASSETS = "/docs/assets"
# Groups of operations, and the list of schemas, are opened by whoever reads them.
FOLDED = {"docExpansion": "none", "defaultModelsExpandDepth": 0}

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def documentation(request: Request) -> HTMLResponse:
    """Swagger UI over ``/openapi.json``."""
    base = _base(request)
    return get_swagger_ui_html(
        openapi_url=f"{base}/openapi.json",
        title="mlx_parallm",
        swagger_js_url=f"{base}{ASSETS}/swagger-ui-bundle.js",
        swagger_css_url=f"{base}{ASSETS}/swagger-ui.css",
        swagger_favicon_url=f"{base}{ASSETS}/favicon-32x32.png",
        swagger_ui_parameters=FOLDED,
    )


def _base(request: Request) -> str:
    """What a browser must write before a path (``--root-path``)."""
    return request.scope.get("root_path", "").rstrip("/")


def assets() -> StaticFiles:
    """The files of Swagger UI."""
    return StaticFiles(directory=str(files("fastapi_swagger") / "resources"))
