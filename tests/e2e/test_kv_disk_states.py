"""`--kv-disk` with models that keep a state: what a server finds after one that was killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.hub_cache import hub_copy
from tests.hybrid_folder import write_hybrid
from tests.kv_folders import num_entries, wait_until_saved
from tests.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.one_engine]

BLOCK = 16
SYSTEM = "\n".join(f"rule {number} of a long system prompt" for number in range(20))
#: TURNS: each with an answer before it, in bytes that are tokens.
TURNS = [f"{SYSTEM}\nFirst question?", "\nAn answer. And then?", "\nAnother one. And at last?"]
#: Layers with KV and convolutions, a gated delta rule, and states alone.
ARCHITECTURES = ("lfm2", "qwen3_next", "mamba2")


@contextmanager
def serving(
    model: Path, disk: Path, *flags: str, ends_by: int = signal.SIGKILL
) -> Iterator[ServerProcess]:
    server = ServerProcess(
        *("--model", str(model), "--served-model-name", "hybrid", "--kv-disk", str(disk), *flags)
    )
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop(ends_by)


def ask(server: ServerProcess, prompt: str, **fields: Any) -> tuple[str, list[float], int]:
    """Return the completion, its log-probabilities, and how many tokens were cached."""
    body = {"model": "hybrid", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body | fields, timeout=None)
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return choice["text"], choice["logprobs"]["token_logprobs"], cached


def place(prompt: str) -> int:
    """Return where the state of a prompt is kept: its tokens are bytes."""
    return (len(prompt) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_server_finds_the_chats_of_one_that_was_killed(architecture: str, tmp_path: Path) -> None:
    model = hub_copy(write_hybrid(tmp_path / "model", architecture), tmp_path / "hub")
    disk = tmp_path / "kv"
    flags = ("--dtype", "float32")
    prompt, last = "", 0
    for turn in TURNS:
        prompt += turn
        with serving(model, disk, *flags) as server:
            text, logprobs, cached = ask(server, prompt)
            assert cached == last
            # Another key computes all of it.
            cold = ask(server, prompt, cache_salt=f"cold {len(prompt)}")
            assert cold == (text, pytest.approx(logprobs, abs=1e-5), 0)
            assert ask(server, prompt)[2] == place(prompt)
            assert server.metric("vllm:external_prefix_cache_hits_total") == cached
            wait_until_saved(server, disk)
        last = place(prompt)


def states_of(disk: Path) -> list[Path]:
    """Return the files that have one entry, which are those of states."""
    return [path for path in disk.glob("*/*.kv1") if num_entries(path) == 1]


def test_what_is_damaged_or_of_another_layout_is_computed(tmp_path: Path) -> None:
    model = hub_copy(write_hybrid(tmp_path / "model"), tmp_path / "hub")
    disk = tmp_path / "kv"
    prompt = TURNS[0]
    with serving(model, disk, "--dtype", "float32") as server:
        wanted = ask(server, prompt)
        wait_until_saved(server, disk)
    with serving(model, disk, "--dtype", "bfloat16") as server:
        assert ask(server, prompt)[2] == 0
    for number in range(3):
        states = states_of(disk)
        assert states
        for path in states:
            raw = bytearray(path.read_bytes())
            match number:
                case 0:
                    path.unlink()
                case 1:
                    path.write_bytes(raw[:-3])
                case _:
                    raw[-9] ^= 1
                    path.write_bytes(raw)
        with serving(model, disk, "--dtype", "float32") as server:
            text, logprobs, cached = ask(server, prompt)
            assert (text, cached) == (wanted[0], 0)
            assert logprobs == pytest.approx(wanted[1], abs=1e-5)
            wait_until_saved(server, disk)
    with serving(model, disk, "--dtype", "float32") as server:
        assert ask(server, prompt)[2] == place(prompt)
