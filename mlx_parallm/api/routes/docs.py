"""``GET /docs``: the API's documentation, with every asset from this server."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.staticfiles import StaticFiles

ASSETS = "/docs/assets"

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def documentation() -> HTMLResponse:
    """Swagger UI over ``/openapi.json``."""
    return get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="mlx_parallm",
        swagger_js_url=f"{ASSETS}/swagger-ui-bundle.js",
        swagger_css_url=f"{ASSETS}/swagger-ui.css",
        swagger_favicon_url=f"{ASSETS}/favicon-32x32.png",
    )


@router.get("/")
async def root() -> RedirectResponse:
    """The documentation is what a browser finds here."""
    return RedirectResponse("/docs")


def assets() -> StaticFiles:
    """The files of Swagger UI."""
    return StaticFiles(directory=str(files("fastapi_swagger") / "resources"))
