"""The public surface of a checkout as sorted text, so that `diff` shows what two of them differ in.

    python scripts/public_surface.py /path/to/checkout > surface.txt

It has the OpenAPI document (a line per leaf), `--help` of every command, the names, types and
labels of /metrics, and docs/configuration.md. The checkout's own server is started as users start
it, with the embedded models, and asked; nothing of this checkout is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

API_KEY, ADMIN_KEY = "surface-key", "surface-admin-key"
# Help texts are wrapped to the width of the terminal.
COLUMNS = "100"
START_S = 300.0
MODELS = ("mlx-parallm-demo", "demo:embed")
POLL_S = 0.1
# Requests that make their families of metrics appear.
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    ("/v1/embeddings", {"input": "Hi", "model": MODELS[1]}),
)


def main() -> None:
    """Print the surface of the checkout that is named."""
    parser = argparse.ArgumentParser(description="Print the public surface of a checkout.")
    parser.add_argument("tree", nargs="?", type=Path, default=Path.cwd(), help="the checkout")
    tree = parser.parse_args().tree.resolve()
    with running_server(tree) as url:
        document = json.loads(fetch(f"{url}/openapi.json"))
        for path, body in REQUESTS:
            fetch(f"{url}{path}", body)
        metrics = fetch(f"{url}/metrics")
    lines = [f"openapi {line}" for line in leaves(document)]
    lines += [f"help {line}" for line in help_lines(tree)]
    lines += [f"metrics {line}" for line in metric_lines(metrics)]
    page = (tree / "docs" / "configuration.md").read_text(encoding="utf-8")
    lines += [f"configuration.md {line}" for line in page.splitlines() if line]
    print("\n".join(sorted(set(lines))))


def leaves(value: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each leaf of a JSON value: its place and what is there."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{place}[{number}]")
    else:
        yield f"{place} = {json.dumps(value, ensure_ascii=False)}"


def help_lines(tree: Path, *command: str) -> Iterator[str]:
    """Yield the lines of a command's help and of those below it, each with its command."""
    done = subprocess.run(
        [sys.executable, "-m", "mlx_parallm", *command, "--help"],
        cwd=tree,
        env=environment(tree),
        capture_output=True,
        text=True,
        check=True,
    )
    name = " ".join(command) or "mlx_parallm"
    yield from (f"{name}: {line}" for line in done.stdout.splitlines() if line.strip())
    # A usage that ends so has commands below it, in a list.
    if re.search(r"(COMMAND|WHAT) \.\.\.\n", done.stdout):
        for below in re.findall(r"^ +([a-z][\w-]*) {2,}", done.stdout, re.MULTILINE):
            yield from help_lines(tree, *command, below)


def metric_lines(text: str) -> Iterator[str]:
    """Yield each family's help and type, and each series' name with the names of its labels."""
    for line in text.splitlines():
        if line.startswith("#"):
            yield line
            continue
        name, _, values = line.rpartition(" ")[0].partition("{")
        labels = ",".join(sorted(re.findall(r'(\w+)="', values)))
        yield f"{name}{{{labels}}}"


@contextmanager
def running_server(tree: Path) -> Iterator[str]:
    """Serve embedded models from a checkout; yield its address."""
    with (
        tempfile.TemporaryDirectory() as data_dir,
        tempfile.TemporaryFile(mode="w+") as log,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        flags = ["--fd", str(listener.fileno()), "--data-dir", data_dir]
        process = subprocess.Popen(
            [sys.executable, "-m", "mlx_parallm", "serve", *MODELS, *flags],
            cwd=tree,
            env=environment(tree)
            | {"MLX_PARALLM_API_KEY": API_KEY, "MLX_PARALLM_ADMIN_API_KEY": ADMIN_KEY},
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[listener.fileno()],
        )
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        try:
            wait_until_ready(process, url)
            yield url
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            process.terminate()
            process.wait()


def wait_until_ready(process: subprocess.Popen[Any], url: str) -> None:
    """Return once /health answers."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            fetch(f"{url}/health")
        except OSError:
            time.sleep(POLL_S)
        else:
            return
    raise RuntimeError("The server did not start.")


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    """Return the text that an address answers with."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {API_KEY}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
        return answer.read().decode()


def environment(tree: Path) -> dict[str, str]:
    """Return the variables for a process that imports the package of a checkout."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("MLX_PARALLM_")
    }
    return {**kept, "PYTHONPATH": str(tree), "COLUMNS": COLUMNS}


if __name__ == "__main__":
    main()
