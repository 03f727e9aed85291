"""A wrong start of a server is refused before the server's modules are imported."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm.cli.serve_start import default_data_dir

HEAVY = ("fastapi", "huggingface_hub", "mlx", "numpy", "prometheus_client", "pydantic", "uvicorn")
DRAFT = {"method": "draft_model", "model": "/no/draft", "num_speculative_tokens": 2}
PROGRAM = f"""
import json, sys
from mlx_parallm.cli.main import main
code = main(sys.argv[1:])
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def started(*flags: str) -> tuple[int, list[str], str]:
    """Return a start's exit status, the large libraries that it has imported, and its words."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "serve", *flags], capture_output=True, text=True, check=True
    )
    code, imported = json.loads(done.stdout)
    return code, imported, done.stderr


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["/no/folder"], 1, "There is no folder /no/folder."),
        (["./missing"], 1, "There is no folder ./missing."),
        (["a/b/c"], 1, "There is no folder a/b/c."),
        (["--model", "/no/one", "/no/two"], 1, "There is no folder /no/one."),
        ([__file__], 1, "is a file; a model is a folder"),
        (["--speculative-config", json.dumps(DRAFT)], 1, "There is no folder /no/draft."),
        (["--fd", "999"], 2, "fd: 999 is not an open socket"),
        (["--host", "256.0.0.1"], 2, "cannot listen on 256.0.0.1"),
        (["--kv-disk-bytes", "1GiB"], 2, "--kv-disk-bytes needs --kv-disk"),
        (["--kv-disk", __file__], 2, f"--kv-disk: {__file__} is not a folder"),
        (["--max-num-seqs", "none"], 2, "max-num-seqs"),
    ],
)
def test_a_wrong_start_is_refused_before_imports(flags: list[str], status: int, words: str) -> None:
    code, imported, words_shown = started(*flags)
    assert (code, imported) == (status, [])
    assert words in words_shown
    assert "Traceback" not in words_shown


def test_a_damaged_gguf_file_is_refused_before_imports(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (10**9).to_bytes(8, "little"))
    code, imported, words_shown = started(str(path))
    assert (code, imported) == (1, [])
    assert "cannot be read as GGUF" in words_shown
    assert "Traceback" not in words_shown


def test_a_port_in_use_is_told_before_imports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        code, imported, words_shown = started("--port", str(other.getsockname()[1]))
    assert (code, imported) == (2, [])
    assert "Address already in use" in words_shown


def test_the_data_folder_is_the_users() -> None:
    assert default_data_dir({"XDG_DATA_HOME": "/data"}, "linux") == "/data/mlx_parallm"
    home = Path.home()
    assert default_data_dir({"XDG_DATA_HOME": "data"}, "linux") == str(
        home / ".local" / "share" / "mlx_parallm"
    )
    assert default_data_dir({}, "darwin").startswith(str(home / "Library"))
