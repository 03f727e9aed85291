"""The documentation: what a browser sees needs nothing from elsewhere, and every block runs."""

from __future__ import annotations

import gc
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.documentation import PageRunner, indented_code, read_blocks
from tests.server_process import ROOT, ServerProcess

MODELS = (
    "mlx-parallm-demo",
    "demo:mlm",
    "demo:sentiment",
    "demo:embed",
    "demo:reward",
    "demo:see",
    "demo:translate",
    "demo:cartpole",
    "demo:memory",
)
FOLDERS = (
    ".",
    "docs",
    "docs/decisions",
    "examples/grpo",
    "examples/mezo",
    "examples/policies",
    "examples/reward_model",
    "loadtests",
    "benchmarks",
    "benchmarks/results",
)


def pages_with_code() -> list[str]:
    """Return the paths of all pages that show code, relative to the repository."""
    pages = [path for name in FOLDERS for path in sorted((ROOT / name).glob("*.md"))]
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages}
    return [page for page, text in texts.items() if "```" in text or indented_code(text)]


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yield a server of all embedded models, which the pages take for the one at port 8000."""
    folder = tmp_path_factory.mktemp("kv")
    server = ServerProcess("--model", *MODELS, "--kv-disk", str(folder), is_forked=False)
    server.wait_until_ready()
    yield server
    server.stop()


# LONG pages: blocks start engines of their own, or wait for a batch.
LONG = ("docs/scaling.md", "docs/batch-api.md")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow) if page in LONG else page
        for page in pages_with_code()
    ],
)
def test_every_block_of_a_page_runs_or_says_why_not(
    page: str, demo_server: ServerProcess, tmp_path: Path
) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not indented_code(text), "write code between fences, with its language"
    runner = PageRunner(demo_server.port, tmp_path, frozenset(MODELS))
    try:
        runner.run_page(read_blocks(page, text))
    finally:
        forget_adapters(demo_server)
        with warnings.catch_warnings():
            # Programs of a page leave their clients to the end of the process.
            warnings.simplefilter("ignore", ResourceWarning)
            del runner
            gc.collect()


def forget_adapters(server: ServerProcess) -> None:
    """Unload what a page loaded, so that the next page finds the server as it was started."""
    for adapter in httpx2.get(f"{server.url}/v1/adapters").json()["data"]:
        httpx2.delete(f"{server.url}/v1/adapters/{adapter['name']}").raise_for_status()


def test_every_asset_of_the_documentation_is_served_here(demo_server: ServerProcess) -> None:
    page = httpx2.get(f"{demo_server.url}/docs").text
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert links
    for link in links:
        assert link.startswith("/")
        assert httpx2.get(demo_server.url + link).status_code == 200


def test_the_schema_lists_the_routes(demo_server: ServerProcess) -> None:
    schema = httpx2.get(f"{demo_server.url}/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"} <= set(
        schema["paths"]
    )
    assert set(_answers(schema, "/v1/responses")) == {"application/json", "text/event-stream"}
    assert set(_answers(schema, "/metrics", "get")) == {"text/plain"}
    assert "temperature" in schema["components"]["schemas"]["ChatRequest"]["properties"]


def test_the_dashboard_shows_metrics_that_there_are(demo_server: ServerProcess) -> None:
    body = {"model": MODELS[0], "prompt": "a", "max_tokens": 2}
    httpx2.post(f"{demo_server.url}/v1/completions", json=body).raise_for_status()
    embeddings = {"model": "demo:embed", "input": "a"}
    httpx2.post(f"{demo_server.url}/v1/embeddings", json=embeddings).raise_for_status()
    text = httpx2.get(f"{demo_server.url}/metrics").text
    samples = re.findall(r"^([a-z_:]+)\{(.*)\} \S+$", text, re.MULTILINE)
    labels = {name: set(re.findall(r'(\w+)="', fields)) for name, fields in samples}
    dashboard = json.loads((ROOT / "examples/monitoring/grafana.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) >= 18
    for query in queries:
        names = re.findall(r"(?:vllm|mlx_parallm):\w+|http_requests_total", query)
        grouped = {
            label for part in re.findall(r"by \((.*?)\)", query) for label in part.split(", ")
        }
        assert names
        for name in names:
            assert grouped <= labels[name], query


def _answers(schema: dict[str, Any], path: str, method: str = "post") -> dict[str, Any]:
    return schema["paths"][path][method]["responses"]["200"]["content"]
