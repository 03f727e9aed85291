"""A server's process imports nothing large if its engines live in other processes."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest

from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_FOLDERS, PREFIX
from mlx_parallm.tokenizer.encoder_tokenizer import load_encoder_tokenizer
from mlx_parallm.tokenizer.loading import load_tokenizer

pytestmark = pytest.mark.slow

HEAVY = ("mlx", "mlx_lm", "torch", "transformers")
MODULES = (
    "mlx_parallm.api.app",
    "mlx_parallm.cli.api_servers.process",
    "mlx_parallm.cli.serve",
    "mlx_parallm.cli.serve_start",
    "mlx_parallm.engine.core",
    "mlx_parallm.engine.parallel.life",
    "mlx_parallm.peers.life",
    "mlx_parallm.llm",
    "mlx_parallm.offline.engine",
    "mlx_parallm.serving.async_engine",
)


def heavy_modules(*imported: str) -> dict[str, list[str]]:
    """Return which large libraries a process has after it imported each of some modules."""
    code = (
        "import importlib, json, sys\n"
        "def heavy(name):\n"
        "    importlib.import_module(name)\n"
        f"    return [name for name in {HEAVY!r} if name in sys.modules]\n"
        f"print(json.dumps({{name: heavy(name) for name in {imported!r}}}))"
    )
    command = [sys.executable, "-c", code]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def test_the_servers_process_imports_no_large_library() -> None:
    # A library that is absent after all imports is imported by none of these modules.
    assert heavy_modules(*MODULES) == {module: [] for module in MODULES}


def test_an_encoder_is_read_without_a_large_library() -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mlx_parallm.config import EngineConfig, ModelConfig\n"
        "from mlx_parallm.serving.kinds import KINDS\n"
        f"folder = Path({str(DEMO_FOLDERS[PREFIX + 'embed'])!r})\n"
        "kind = next(kind for kind in KINDS if kind.serves(ModelConfig(), folder))\n"
        "kind.read(ModelConfig(path=str(folder)), folder, EngineConfig())\n"
        f"assert not [name for name in {HEAVY!r} if name in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_builders_of_engines_import_mlx() -> None:
    # The process prepares itself first: its own module imports none.
    module = "mlx_parallm.serving.build"
    assert "mlx" in heavy_modules(module)[module]


# READS: prints the large libraries that a process has after it used what it unpickled.
READS = """
import json, pickle, sys
decoder, encoder = pickle.load(sys.stdin.buffer)
message = {"role": "user", "content": "What is 17 + 25?"}
ids = decoder.encode_chat([message]), *encoder.encode(["A text"])
print(json.dumps([[name for name in HEAVY if name in sys.modules], ids]))
"""


def test_tokenizers_are_used_without_a_large_library() -> None:
    decoder = load_tokenizer(DEMO_FOLDER)
    encoder = load_encoder_tokenizer(DEMO_FOLDERS[PREFIX + "embed"])
    code = f"HEAVY = {HEAVY!r}{READS}"
    read = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((decoder, encoder)),
        check=True,
        capture_output=True,
    )
    heavy, (chat, text) = json.loads(read.stdout)
    assert heavy == []
    assert chat == decoder.encode_chat([{"role": "user", "content": "What is 17 + 25?"}])
    assert text == list(*encoder.encode(["A text"]))


# ENDS: a tokenizer that needs mlx_lm brings MLX to the thread that unpickles it.
ENDS = """
import threading
from mlx_parallm.config import EngineConfig
from mlx_parallm.peers.life import RemoteLife
from mlx_parallm.peers.origins import Spawned

def live():
    import mlx_lm
    RemoteLife(EngineConfig(), Spawned([]), lambda *_: None).end()

thread = threading.Thread(target=live)
thread.start()
thread.join()
"""


def test_a_process_in_which_a_life_has_imported_mlx_exits() -> None:
    # Without the end of the life, five of six such processes are aborted.
    for _ in range(3):
        subprocess.run([sys.executable, "-c", ENDS], check=True)
