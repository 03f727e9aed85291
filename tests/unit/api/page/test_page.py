"""The page at ``/``: its files, their headers, and what may ask for them."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from urllib.parse import urljoin

import httpx2
import pytest
from hatchling.builders.wheel import WheelBuilder

from mlx_parallm.api.page.routes import page_files
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT / "mlx_parallm" / "api" / "page" / "assets"
NAMES = sorted(file.name for file in FOLDER.iterdir())
PARTS = [name for name in NAMES if name != "index.html"]
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# A quoted path of a module or a worklet, a link of the page, or a path that is fetched.
LINKS = re.compile(r"""(?:src|href|from|addModule\(new URL\() ?=? ?"([^"#\n]+)\"""")


def client_of(root_path: str = "", **config: object) -> httpx2.AsyncClient:
    app = make_app(FakeEngine(), ServerConfig(**config))  # type: ignore[arg-type]
    transport = httpx2.ASGITransport(app, root_path=root_path)
    return httpx2.AsyncClient(transport=transport, base_url="http://here")


def test_there_is_a_page() -> None:
    assert {"index.html", "app.js", "base.css", "icon.svg"} <= set(NAMES)
    assert set(page_files()) == set(NAMES)


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in PARTS)])
async def test_each_file_is_served_as_what_it_is_and_needs_no_key(path: str) -> None:
    async with client_of(api_keys=("key",)) as client:
        response = await client.get(path)
        head = await client.head(path)
    assert response.status_code == 200
    content_type = TYPES.get(Path(path).suffix, "text/html")
    assert response.headers["content-type"].startswith(content_type)
    assert response.content == (FOLDER / (Path(path).name or "index.html")).read_bytes()
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["etag"] == response.headers["etag"]


async def test_the_policy_allows_this_server_only_and_no_inline_script() -> None:
    async with client_of() as client:
        policy = (await client.get("/")).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for kind in ("script-src", "style-src", "connect-src"):
        assert rules[kind] == "'self'"
    assert rules["img-src"] == "'self' data:"
    # Blobs are recordings of this page; scripts and audio worklets are files of this server.
    assert rules["media-src"] == "blob:"
    assert rules["require-trusted-types-for"] == "'script'"
    assert rules["frame-ancestors"] == "'none'"


SHOWN = ("/", "/page/app.js", "/docs", "/docs/assets/swagger-ui.css", "/openapi.json")


@pytest.mark.parametrize("path", SHOWN)
async def test_no_other_site_may_frame_what_a_browser_shows(path: str) -> None:
    async with client_of() as client:
        headers = (await client.get(path)).headers
    rules = dict(
        rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";")
    )
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert "script-src" not in rules or "unsafe" not in rules["script-src"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


async def test_the_only_inline_script_of_the_documentation_is_its_own() -> None:
    async with client_of() as client:
        page = await client.get("/docs")
    (script,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'self' 'sha256-{digest}'" in page.headers["content-security-policy"]


async def test_a_file_that_is_known_is_not_sent_again() -> None:
    async with client_of() as client:
        tag = (await client.get("/page/app.js")).headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}'):
            again = await client.get("/page/app.js", headers={"if-none-match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == tag
        other = await client.get("/page/app.js", headers={"if-none-match": '"other"'})
    assert other.status_code == 200


@pytest.mark.parametrize("root_path", ["", "/llm"])
async def test_every_link_leads_to_a_file_below_any_prefix(root_path: str) -> None:
    start = f"http://here{root_path}/"
    seen, waiting = set(), [start]
    async with client_of(root_path) as client:
        while waiting:
            url = waiting.pop()
            response = await client.get(url)
            assert response.status_code == 200, url
            seen.add(url)
            # Neither the documentation's files nor an image hold links of the page.
            if not url.endswith(("docs", ".svg")):
                links = {urljoin(url, link) for link in LINKS.findall(response.text)}
                waiting += sorted(links - seen - set(waiting))
    assert {f"{start}page/{name}" for name in PARTS} <= seen
    assert all(url.startswith(start) for url in seen)


@pytest.mark.parametrize(
    "path", ["/page/", "/page/none.js", "/page/index.html", "/page/..%2Fapp.py"]
)
async def test_nothing_else_is_a_part_of_the_page(path: str) -> None:
    async with client_of() as client:
        response = await client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_page_is_small_and_only_its_own() -> None:
    for name in NAMES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert len(text.splitlines()) < 400, name
        assert "innerHTML" not in text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
    assert not re.search(
        r"<script(?![^>]* src=)|\son\w+=|\sstyle=", (FOLDER / "index.html").read_text()
    )


def test_the_wheel_holds_the_page() -> None:
    included = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"mlx_parallm/api/page/assets/{name}" for name in NAMES} <= included
