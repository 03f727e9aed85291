"""Features and prefixes are found again for equal images, weights and scopes alone."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.client.tensors import encode_safetensors
from tests.e2e.test_images import NUM_TOKENS, image, text, url_of
from tests.image_folders import write_llava
from tests.server_process import ServerProcess

RAW = {"content-type": "application/octet-stream"}
BLOCK_SIZE = 16
#: ``PARTS``: a weight of the tower, of the projector and of the text model.
PARTS = (
    "vision_tower.encoder.layers.0.mlp.fc1.weight",
    "multi_modal_projector.linear_1.weight",
    "model.layers.0.mlp.up_proj.weight",
)


class Asked(NamedTuple):
    """An answer, and what it took."""

    text: str
    tower_runs: float
    num_cached: int


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    write_llava(root / "first")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(
        *("--model", str(root / "first"), "--allowed-adapter-roots", str(root)),
        *("--allowed-local-media-path", str(root), "--served-model-name", "see"),
    )
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def http(server: ServerProcess, root: Path) -> Iterator[httpx2.Client]:
    """Yield a client of a server with its first weights and nothing computed by them."""
    with httpx2.Client(base_url=server.url) as client:
        restore(client, root)
        yield client


def restore(http: httpx2.Client, root: Path) -> None:
    """Load the first weights, and forget what they have computed."""
    body = {"weight_dir": str(root / "first"), "version": "first"}
    assert http.post("/update_weights", json=body).status_code == 200
    assert http.post("/reset_prefix_cache").status_code == 200


def metric(server: ServerProcess, name: str) -> float:
    return server.metric(f"vllm:{name}")


def ask(
    server: ServerProcess,
    http: httpx2.Client,
    *,
    before: str = "w20",
    shown: dict[str, Any] | None = None,
    after: str = "w21 w22",
    **more: Any,
) -> Asked:
    runs = metric(server, "image_tower_runs_total")
    content: list[dict[str, Any]] = [text(before), shown or image(5), text(after)]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
    }
    answer = http.post("/v1/chat/completions", json=body | more).json()
    return Asked(
        str(answer["choices"][0]["logprobs"]["content"]),
        metric(server, "image_tower_runs_total") - runs,
        answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def say_hello(http: httpx2.Client) -> None:
    body = {"messages": [{"role": "user", "content": "w30"}], "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def weight_of(root: Path, name: str) -> np.ndarray:
    loaded: Any = mx.load(str(root / "first" / "model.safetensors"))
    (key,) = [each for each in loaded if each.endswith(name)]
    return np.array(loaded[key])


def checksums(http: httpx2.Client) -> dict[str, str]:
    return http.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]


#: ``WORDS``: a text that is longer than some blocks.
WORDS = " ".join(f"w{20 + number % 70}" for number in range(380))


@pytest.mark.one_engine
def test_a_second_chat_finds_a_image_and_the_text_around_it(
    server: ServerProcess, http: httpx2.Client
) -> None:
    ask(server, http, after=f"{WORDS} w20")
    same = ask(server, http, after=f"{WORDS} w21")
    num_shared = 2 + NUM_TOKENS + 380  # user: w20, the image, the words
    assert same.tower_runs == 0
    assert same.num_cached >= 0.95 * num_shared
    other = ask(server, http, before=WORDS, shown=image(6))
    another = ask(server, http, before=WORDS, shown=image(7))
    assert (other.tower_runs, another.tower_runs) == (1, 1)
    # The text before the image begins in the last of these blocks.
    assert another.num_cached == (1 + 380) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.one_engine
def test_other_bytes_salts_and_adapters_find_nothing(
    server: ServerProcess, http: httpx2.Client, root: Path
) -> None:
    file = root / "image.png"
    shown = {"type": "image_url", "image_url": {"url": f"file://{file}"}}

    def asked(**more: Any) -> tuple[float, int]:
        return ask(server, http, shown=shown, after=WORDS, **more)[1:]

    nothing = (1, 0)
    for seed in (8, 9):
        file.write_bytes(base64.b64decode(url_of(seed).partition(",")[2]))
        assert asked() == nothing
        assert asked() == (0, (3 + NUM_TOKENS + 380) // BLOCK_SIZE * BLOCK_SIZE)
    for salt in ("first", "second"):
        assert asked(cache_salt=salt) == nothing
    body = {"lora_name": "policy", "lora_path": str(write_adapter(root / "policy"))}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert asked(model="policy") == nothing
    assert asked()[0] == 0


def write_adapter(folder: Path) -> Path:
    """Write an adapter of the text model by the names of PEFT."""
    folder.mkdir()
    layer = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
    shapes = {"lora_A": (2, 32), "lora_B": (32, 2)}
    factors = {
        f"{layer}.{name}.weight": np.full(shape, 0.5, np.float32) for name, shape in shapes.items()
    }
    (folder / "adapter_model.safetensors").write_bytes(encode_safetensors(factors))
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.one_engine
@pytest.mark.parametrize("part", PARTS)
def test_features_of_earlier_weights_are_not_found(
    server: ServerProcess, http: httpx2.Client, root: Path, part: str
) -> None:
    sums = checksums(http)
    (name,) = [each for each in sums if each.endswith(part)]
    first = ask(server, http)
    assert ask(server, http, before="w40").tower_runs == 0
    changed = encode_safetensors({name: -weight_of(root, part)})
    answer = http.post("/update_weights", content=changed, headers=RAW)
    assert answer.status_code == 200, answer.text
    second = ask(server, http)
    assert (second.tower_runs, second.num_cached) == (1, 0)
    assert second.text != first.text
    report = http.post("/weight_checker", json={"action": "compare", "baseline": sums}).json()
    assert report["mismatches"] == [name]
    restore(http, root)
    assert checksums(http) == sums
    assert ask(server, http).text == first.text


@pytest.mark.one_engine
def test_sleep_gives_features_and_towers_back(server: ServerProcess, http: httpx2.Client) -> None:
    first = ask(server, http)
    assert metric(server, "image_feature_bytes") > 0
    for level in (1, 2):
        assert http.post(f"/sleep?level={level}&mode=wait").json()["status"] == "sleeping"
        assert http.post("/wake_up").json()["status"] == "awake"
        say_hello(http)
        assert metric(server, "image_feature_bytes") == 0
        again = ask(server, http)
        assert (again.text, again.tower_runs) == (first.text, 1)
