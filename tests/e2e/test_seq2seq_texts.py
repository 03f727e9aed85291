"""A task's text is what transformers makes of the same folder, for each family's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.numpy import save_file

from tests.golden_weights import golden_weight
from tests.seq2seq_texts import CASES
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "seq2seq_texts.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    for name, case in CASES.items():
        (root / name).mkdir()
        case.write(root / name)
        arrays = {
            key: golden_weight(key, tuple(shape)) for key, shape in GOLDEN[name]["shapes"].items()
        }
        save_file(arrays, root / name / "model.safetensors", metadata={"format": "pt"})
    folders = [str(root / name) for name in CASES]
    server = ServerProcess("--model", *folders, "--dtype", "float32")
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.mark.parametrize("family", CASES)
def test_texts_are_those_of_transformers(server: ServerProcess, family: str) -> None:
    for row in GOLDEN[family]["outputs"]:
        parameters: dict[str, Any] = {"num_beams": row["width"], **CASES[family].languages}
        answer = httpx2.post(
            f"{server.url}/models/{family}", json={"inputs": row["text"], "parameters": parameters}
        )
        assert answer.status_code == 200, answer.text
        text = answer.json()[0]["generated_text"]
        if family == "byt5":
            # transformers drops bytes that are no UTF-8.
            text = text.replace("\ufffd", "")
        assert text == row["output"], row
