"""Models and adapters from a fake hub, in separate processes because of HF_ENDPOINT."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from mlx_parallm.models.checkpoints.contents import FolderContents
from tests import adapter_files
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/tiny"
ADAPTER = "org/lora"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"w" * 300_000,
    "consolidated.safetensors": b"twice the same weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "modeling.py": b"print('remote code')",
    "README.md": b"# Tiny",
    "pytorch_model.bin": b"not for MLX",
}
ADAPTER_FILES = {
    "adapter_config.json": json.dumps(dict(adapter_files.CONFIG)).encode(),
    "adapters.safetensors": adapter_files.upload(1),
    "tokenizer.json": b"{}",
    "optimizer.pt": b"not for serving",
}
INDEXED = "org/indexed"
WEIGHT_MAP = {"a": "trunk.safetensors", "b": "head.safetensors"}
INDEXED_FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors.index.json": json.dumps({"weight_map": WEIGHT_MAP}).encode(),
    "trunk.safetensors": b"t" * 1000,
    "head.safetensors": b"h" * 1000,
    "other.safetensors": b"not in the index",
}
#: The files of each repository.
REPOS = {REPO: FILES, ADAPTER: ADAPTER_FILES, INDEXED: INDEXED_FILES}
ADAPTER_SCRIPT = """
import json, sys
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.weights.hub import log_download, resolve_adapter

try:
    folder = resolve_adapter(sys.argv[1], log_download)
except ModelLoadError as error:
    print(json.dumps({"error": str(error)}))
else:
    files = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else None
    print(json.dumps({"folder": str(folder), "files": files}))
"""
SCRIPT = """
import json, sys
from pathlib import Path
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.weights.hub import resolve_model

path, revision, trust = json.loads(sys.argv[1])
reports = []
try:
    folder = resolve_model(
        path, revision, lambda *report: reports.append(report), trust_remote_code=trust
    )
except ModelLoadError as error:
    print(json.dumps({"error": str(error)}))
else:
    files = {file.name: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    print(json.dumps({"folder": str(folder), "files": files, "reports": reports}))
"""


@dataclass
class Hub:
    """The parts of the hub's protocol that a snapshot download uses."""

    paths: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.paths.append(path)
        for repo, files in REPOS.items():
            content = self._of(repo, files, path)
            if content is not None:
                return content
        if path.startswith("/api/models/org/gated"):
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def _of(
        self, repo: str, files: Mapping[str, bytes], path: str
    ) -> tuple[int, dict[str, str], bytes] | None:
        if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
            siblings = [{"rfilename": name} for name in files]
            return self._json({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings})
        if path == f"/api/models/{repo}/tree/{COMMIT}":
            return self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                    for name, data in files.items()
                ]
            )
        name = path.removeprefix(f"/{repo}/resolve/{COMMIT}/")
        if name in files:
            data = files[name]
            # The hub names files of LFS, which weights are, by their SHA-256.
            is_large = name.endswith(".safetensors")
            tag = hashlib.sha256(data).hexdigest() if is_large else _oid(data)
            return 200, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, data
        if path.startswith(f"/api/models/{repo}/revision/"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        return None

    def _json(self, content: object) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[tuple[Hub, str]]:
    stand_in = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = stand_in.answer(urlsplit(self.path).path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield stand_in, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def resolve(
    endpoint: str,
    home: Path,
    path: str = REPO,
    revision: str | None = None,
    *,
    trust: bool = False,
    **variables: str,
) -> dict:
    """Return what ``resolve_model`` returns or raises in a new process."""
    arguments = json.dumps([path, revision, trust])
    return run(SCRIPT, arguments, environment(endpoint, home) | variables)


def environment(endpoint: str, home: Path) -> dict[str, str]:
    """Return the environment variables that send huggingface_hub to the fake."""
    where = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    return where | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def run(script: str, argument: str, variables: Mapping[str, str]) -> dict:
    result = subprocess.run(
        [sys.executable, "-c", script, argument],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout)


def test_only_the_files_a_model_needs_are_fetched(hub: tuple[Hub, str], tmp_path: Path) -> None:
    wanted = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
    folder = resolve(hub[1], tmp_path)
    assert folder["files"] == {name: len(FILES[name]) for name in wanted}


@pytest.mark.parametrize("repo", [REPO, INDEXED])
def test_the_content_of_a_download_is_known_at_once(
    hub: tuple[Hub, str], tmp_path: Path, repo: str
) -> None:
    folder = Path(resolve(hub[1], tmp_path / "home", repo)["folder"])
    copy = shutil.copytree(folder, tmp_path / "copy")
    finder = FolderContents()
    seen = finder.see(copy)
    assert seen.digest is None
    finder.hash(seen)
    finder.join()
    assert finder.see(folder).digest == seen.digest is not None


def test_files_that_the_index_names_are_fetched(hub: tuple[Hub, str], tmp_path: Path) -> None:
    folder = resolve(hub[1], tmp_path, INDEXED)
    assert folder["files"].keys() == INDEXED_FILES.keys() - {"other.safetensors"}


def test_python_files_come_only_when_remote_code_is_trusted(
    hub: tuple[Hub, str], tmp_path: Path
) -> None:
    assert "modeling.py" in resolve(hub[1], tmp_path, trust=True)["files"]


def test_progress_grows_to_one(hub: tuple[Hub, str], tmp_path: Path) -> None:
    reports = resolve(hub[1], tmp_path)["reports"]
    assert {text for text, _ in reports} == {f"Downloading {REPO}"}
    shares = [share for _, share in reports]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_cached_snapshot_serves_without_a_network(hub: tuple[Hub, str], tmp_path: Path) -> None:
    folder = resolve(hub[1], tmp_path)["folder"]
    num_paths = len(hub[0].paths)
    assert resolve(hub[1], tmp_path, HF_HUB_OFFLINE="1")["folder"] == folder
    assert resolve("http://127.0.0.1:9", tmp_path)["folder"] == folder
    assert len(hub[0].paths) == num_paths


@pytest.mark.parametrize(
    ("path", "revision", "complaint"),
    [
        ("org/absent", None, "org/absent is neither a folder nor on the hub"),
        ("org/gated", None, "org/gated is gated"),
        (REPO, "v9", "org/tiny has no revision 'v9' on the hub"),
        ("./nowhere", None, "There is no folder ./nowhere"),
        ("what is this?", None, "is neither a folder nor a hub id"),
        (__file__, None, "is a file; a model is a folder"),
    ],
)
def test_a_model_that_cannot_be_had_says_why(
    hub: tuple[Hub, str], tmp_path: Path, path: str, revision: str | None, complaint: str
) -> None:
    assert complaint in resolve(hub[1], tmp_path, path, revision)["error"]


def test_no_network_and_no_cache_is_said(tmp_path: Path) -> None:
    error = resolve("http://127.0.0.1:9", tmp_path)["error"]
    assert error == f"{REPO} is not in the local cache and the hub cannot be reached."


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    folder = resolve("http://127.0.0.1:9", tmp_path / "home", str(tmp_path))
    assert folder == {"folder": str(tmp_path), "files": {"config.json": 2}, "reports": []}


def test_of_an_adapter_its_files_alone_are_fetched(hub: tuple[Hub, str], tmp_path: Path) -> None:
    output = run(ADAPTER_SCRIPT, ADAPTER, environment(hub[1], tmp_path))
    assert output["files"] == ["adapter_config.json", "adapters.safetensors"]
    num_paths = len(hub[0].paths)
    offline = environment("http://127.0.0.1:9", tmp_path) | {"HF_HUB_OFFLINE": "1"}
    assert run(ADAPTER_SCRIPT, ADAPTER, offline) == output
    assert len(hub[0].paths) == num_paths


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("org/absent", "org/absent is neither a folder nor on the hub"),
        (REPO, "org/tiny is not an adapter"),
        ("org/gated", "org/gated is gated"),
    ],
)
def test_an_adapter_that_cannot_be_had_says_why(
    hub: tuple[Hub, str], tmp_path: Path, path: str, complaint: str
) -> None:
    assert complaint in run(ADAPTER_SCRIPT, path, environment(hub[1], tmp_path))["error"]


@pytest.mark.parametrize("path", ["./org/lora", "/org/lora", "lora", "a/b/c"])
def test_what_is_no_id_is_a_folder(hub: tuple[Hub, str], tmp_path: Path, path: str) -> None:
    output = run(ADAPTER_SCRIPT, path, environment(hub[1], tmp_path))
    assert output == {"folder": str(Path(path)), "files": None}
    assert not hub[0].paths


def test_a_server_loads_the_adapters_of_the_hub_that_it_may(
    hub: tuple[Hub, str], tmp_path: Path
) -> None:
    adapter_files.save(tmp_path / "adapters" / "org" / "here", 2)
    server = ServerProcess(
        "--max-num-seqs", "2", "--max-model-len", "128",
        "--adapter-dir", str(tmp_path / "adapters"),
        "--allowed-adapter-repos", ADAPTER, "org/absent", "org/here",
        env=environment(hub[1], tmp_path / "home"),
    )  # fmt: skip
    try:
        server.wait_until_ready()
        check_loads(server.url, str(tmp_path / "adapters" / "org" / "here"))
    finally:
        server.stop()
    assert not any("gated" in path or "here" in path for path in hub[0].paths)


def check_loads(url: str, folder: str) -> None:
    """Check that every dialect loads allowed ids and refuses others, naming the setting."""
    with httpx2.Client(base_url=url) as http:
        for name, path in (("a", "/v1/load_lora_adapter"), ("b", "/load_lora_adapter")):
            answer = http.post(path, json={"lora_name": name, "lora_path": ADAPTER})
            assert answer.status_code == 200, answer.text
        body = {"lora_name": "c", "lora_path": "org/here"}
        assert http.post("/load_lora_adapter", json=body).status_code == 200
        cards = http.get("/v1/adapters").json()["data"]
        assert [card["source"] for card in cards] == [ADAPTER, ADAPTER, folder]
        assert cards[0]["digest"] == cards[1]["digest"] != cards[2]["digest"]
        prompt = {"model": "a", "prompt": [1, 2], "max_tokens": 1}
        assert http.post("/v1/completions", json=prompt).status_code == 200
        for repo, message in (
            ("org/absent", "on the hub"),
            ("org/gated", "--allowed-adapter-repos"),
        ):
            body = {"lora_name": "d", "lora_path": repo}
            error = http.post("/v1/load_lora_adapter", json=body).json()["error"]
            assert (error["param"], message in error["message"]) == ("lora_path", True)
