"""``--kv-peers`` and ``--prefill-peer``: KV that another server has computed, or computes."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from benchmarks.paced_proxy import PacedProxy
from mlx_parallm.client.tensors import encode_safetensors
from tests import adapter_files
from tests.e2e.test_live_weights import NAME as WEIGHT
from tests.e2e.test_live_weights import weight
from tests.server_process import ServerProcess

NUM_TOKENS = 600
NUM_FOUND = NUM_TOKENS // 16 * 16
KEY, ADMIN_KEY = "a-key-of-a-client", "the-key-of-the-fleet"
FLAGS = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY, "--cache-scope", "server")
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
#: ``UNPACED``: steps of fewer than 16 tokens say nothing of how long computing takes. So what a
#: peer has, or computes, is awaited for seconds, however busy the machine is.
UNPACED = ("--max-num-batched-tokens", "8", "--max-num-seqs", "4")
#: ``STEPWISE``: gives the blocks of a long prompt in parts, the first one soon.
STEPWISE = ("--kv-serve", "--max-num-batched-tokens", "256")
#: ``NUM_TRIES``: a prefill peer may be late all the same, and is asked for another prompt then.
NUM_TRIES = 5
PEER_BLOCKS = "mlx_parallm:kv_tier_blocks"
HITS = "mlx_parallm:kv_tier_hit_tokens_total"
RAW = ADMIN | {"content-type": "application/octet-stream"}


def prompt_of(number: int, count: int = NUM_TOKENS) -> list[int]:
    """Return token ids; prompts of two numbers share no block."""
    return [10 + (7 * place + 101 * number) % 2900 for place in range(count)]


def ask(server: ServerProcess, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    """Return a greedy completion with its log-probabilities."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1, **more}
    headers = {"authorization": f"Bearer {KEY}"}
    url = f"{server.url}/v1/completions"
    answer = httpx2.post(url, json=body, headers=headers, timeout=None)
    answer.raise_for_status()
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def texts(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(choice["text"], choice["logprobs"]) for choice in answer["choices"]]


def wait_for_blocks(server: ServerProcess, more_than: float = 0) -> None:
    """Return once a server knows that a peer has so many blocks."""
    while server.metric(PEER_BLOCKS) <= more_than:
        time.sleep(0.05)


def wait_for_news(first: ServerProcess, second: ServerProcess) -> None:
    """Return once a server has read what a peer has now."""
    # Another prompt adds blocks, which come with all earlier ones.
    before = second.metric(PEER_BLOCKS)
    ask(first, prompt_of(int(before) + 1000, 2000), max_tokens=1)
    wait_for_blocks(second, before + 100)


def start(*flags: str) -> ServerProcess:
    server = ServerProcess(*flags, *FLAGS)
    server.wait_until_ready()
    return server


def start_reader(*flags: str) -> ServerProcess:
    """Start a server that waits for blocks of peers."""
    return start(*flags, *UNPACED)


@pytest.fixture(scope="module")
def first() -> Iterator[ServerProcess]:
    server = start(*STEPWISE)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def second(first: ServerProcess) -> Iterator[ServerProcess]:
    server = start_reader("--kv-peers", first.url)
    yield server
    server.stop()


def test_a_prefix_comes_from_a_peer(first: ServerProcess, second: ServerProcess) -> None:
    prompt = prompt_of(1)
    cold, memory = ask(first, prompt), ask(first, prompt)
    # What it reads first may be some of the prompt's blocks.
    wait_for_blocks(second)
    wait_for_news(first, second)
    answer = ask(second, prompt)
    assert texts(answer) == texts(memory)
    assert texts(answer)[0][0] == texts(cold)[0][0]
    assert cached(answer) == cached(memory) == NUM_FOUND
    assert second.metric(HITS) == NUM_FOUND
    assert second.metric("vllm:external_prefix_cache_hits_total") == NUM_FOUND


@pytest.mark.slow
def test_a_salt_is_part_of_what_is_found(first: ServerProcess, second: ServerProcess) -> None:
    prompt = prompt_of(2)
    ask(first, prompt, cache_salt="a tenant's")
    memory = ask(first, prompt, cache_salt="a tenant's")
    wait_for_news(first, second)
    assert cached(ask(second, prompt)) == 0
    assert cached(ask(second, prompt, cache_salt="another's")) == 0
    answer = ask(second, prompt, cache_salt="a tenant's")
    assert texts(answer) == texts(memory)
    assert cached(answer) == NUM_FOUND


@pytest.mark.slow
def test_an_adapter_is_known_by_its_content(first: ServerProcess, second: ServerProcess) -> None:
    prompt = prompt_of(3)
    for server, name, seed in ((first, "ours", 1), (second, "theirs", 1), (second, "other", 2)):
        params = {"name": name, "config": json.dumps(adapter_files.CONFIG)}
        url = f"{server.url}/v1/update_adapter_weights"
        data = adapter_files.upload(seed)
        answer = httpx2.post(url, content=data, params=params, headers=RAW, timeout=None)
        answer.raise_for_status()
    ask(first, prompt, model="ours")
    memory = ask(first, prompt, model="ours")
    wait_for_news(first, second)
    assert cached(ask(second, prompt, model="other")) == 0
    answer = ask(second, prompt, model="theirs")
    assert texts(answer) == texts(memory)
    assert cached(answer) == NUM_FOUND


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_only_the_admin_key_learns_what_is_cached(first: ServerProcess, method: str) -> None:
    path = "filter?owner=" + "ab" * 32 if method == "GET" else "blocks"
    body = {"owner": "ab" * 32, "contents": ["cd" * 32]} if method == "POST" else None
    answers = {
        key: httpx2.request(
            method,
            f"{first.url}/v1/kv/{path}",
            json=body,
            headers={"authorization": f"Bearer {key}"} if key else {},
        ).status_code
        for key in ("", "wrong", KEY, ADMIN_KEY)
    }
    assert answers == {"": 401, "wrong": 401, KEY: 401, ADMIN_KEY: 404}


@pytest.mark.slow
def test_engines_in_processes_of_their_own_give_blocks() -> None:
    proxy = PacedProxy(0)
    this = start_reader("--kv-serve", "--engine-process", "--kv-peers", proxy.url)
    other = start_reader("--kv-serve", "--api-server-count", "2", "--kv-peers", this.url)
    proxy.target = other.port
    try:
        for number, (peer, server) in enumerate(((this, other), (other, this))):
            prompt = prompt_of(40 + number)
            ask(peer, prompt)
            wait_for_blocks(server)
            wait_for_news(peer, server)
            assert cached(ask(server, prompt)) == NUM_FOUND
    finally:
        this.stop()
        other.stop()
        proxy.close()


@pytest.mark.slow
def test_any_of_several_engines_gives_blocks() -> None:
    peer = start(*STEPWISE, "--data-parallel-size", "2")
    server = start_reader("--kv-peers", peer.url, "--prefill-peer", peer.url)
    prompts = [prompt_of(50 + number) for number in range(4)]
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda prompt: ask(peer, prompt), prompts))
        text = httpx2.get(f"{peer.url}/metrics").text
        computed = re.findall(r'^vllm:prompt_tokens_total{.*engine="(\d)".*} (\S+)$', text, re.M)
        assert {rank for rank, count in computed if float(count)} == {"0", "1"}
        wait_for_blocks(server)
        wait_for_news(peer, server)
        assert [cached(ask(server, prompt)) for prompt in prompts] == [NUM_FOUND] * 4
        # The engine that computes this one is known to the peer alone.
        tries = (cached(ask(server, prompt_of(60 + number, 3000))) for number in range(NUM_TRIES))
        assert any(tries)
        assert server.metric("mlx_parallm:prefill_peer_used_total") == 1
    finally:
        peer.stop()
        server.stop()


@pytest.mark.slow
def test_a_server_that_serves_no_kv_has_no_such_path(second: ServerProcess) -> None:
    for path in ("filter", "blocks", "prefill"):
        answer = httpx2.post(f"{second.url}/v1/kv/{path}", json={}, headers=ADMIN)
        assert answer.status_code == 404


@pytest.mark.slow
def test_other_weights_are_not_read_and_a_killed_peer_costs_no_request() -> None:
    first = start("--kv-serve")
    second = start_reader("--kv-peers", first.url)
    try:
        prompt = prompt_of(4)
        ask(first, prompt)
        wait_for_blocks(second)
        data = encode_safetensors({WEIGHT: -weight()})
        url = f"{second.url}/update_weights"
        httpx2.post(url, content=data, headers=RAW, timeout=None).raise_for_status()
        assert cached(ask(second, prompt)) == 0
        # Equal updates make equal weights, whose KV is found.
        url = f"{first.url}/update_weights"
        httpx2.post(url, content=data, headers=RAW, timeout=None).raise_for_status()
        prompt = prompt_of(5)
        ask(first, prompt)
        wait_for_news(first, second)
        assert cached(ask(second, prompt)) == NUM_FOUND
        first.stop(signal.SIGKILL)
        assert cached(ask(second, prompt_of(4))) in (0, NUM_FOUND)
        assert second.metric(HITS) == NUM_FOUND
    finally:
        first.stop()
        second.stop()


class TestPrefillPeer:
    """A server whose long prompts another one computes."""

    FLAGS = ("--prefill-min-tokens", "512")
    USED = "mlx_parallm:prefill_peer_used_total"

    @pytest.mark.slow
    def test_a_long_prompt_is_computed_by_a_peer(self, first: ServerProcess) -> None:
        decoder = start_reader("--prefill-peer", first.url, *self.FLAGS)
        try:
            for number in range(NUM_TRIES):
                prompt = prompt_of(40 + number, 1990)
                answer = ask(decoder, prompt)
                if cached(answer) == 1990 // 16 * 16:
                    break
            else:
                pytest.fail("no prompt was computed by the peer")
            assert texts(answer) == texts(ask(first, prompt))
            num_used = decoder.metric(self.USED)
            assert num_used >= 1
            ask(decoder, prompt_of(6, 300))
            assert decoder.metric(self.USED) == num_used
        finally:
            decoder.stop()

    @pytest.mark.slow
    def test_a_peer_that_takes_no_prompt_so_long_costs_time_only(self) -> None:
        peer = start("--kv-serve", "--max-model-len", "1024")
        decoder = start("--prefill-peer", peer.url, *self.FLAGS)
        try:
            prompt = prompt_of(30, 2000)
            first, memory = ask(decoder, prompt), ask(decoder, prompt)
            assert cached(first) == 0
            assert texts(first)[0][0] == texts(memory)[0][0]
            assert decoder.metric(self.USED) == 0
            assert decoder.metric("mlx_parallm:prefill_peer_declined_total") == 1
        finally:
            peer.stop()
            decoder.stop()

    @pytest.mark.slow
    def test_servers_that_name_each_other_send_no_prompt_on(self) -> None:
        proxy = PacedProxy(0)
        this = start("--kv-serve", "--prefill-peer", proxy.url, *self.FLAGS)
        other = start("--kv-serve", "--prefill-peer", this.url, *self.FLAGS)
        proxy.target = other.port
        try:
            for number, server in enumerate((this, other)):
                ask(server, prompt_of(20 + number, 1500))
            # Each had a request of its own, and at most one of the other's.
            for server in (this, other):
                assert server.metric("vllm:e2e_request_latency_seconds_count") in (1, 2)
            # The other one may be late on a busy machine.
            assert this.metric(self.USED) <= 1
        finally:
            this.stop()
            other.stop()
            proxy.close()

    @pytest.mark.slow
    def test_a_peer_that_dies_in_the_middle_costs_time_only(self, first: ServerProcess) -> None:
        peer = start("--kv-serve")
        # Blocks come so slowly that the peer dies between them.
        proxy = PacedProxy(peer.port, 4e6)
        decoder = start("--prefill-peer", proxy.url, *self.FLAGS)

        is_answered = threading.Event()

        def kill_between() -> None:
            # On a busy machine the decoder may have given up before.
            while proxy.num_bytes < 1e6 and not is_answered.is_set():
                time.sleep(0.01)
            peer.stop(signal.SIGKILL)

        try:
            prompt = prompt_of(8, 4000)
            wanted = ask(first, prompt)
            with ThreadPoolExecutor(1) as threads:
                killed = threads.submit(kill_between)
                try:
                    answer = ask(decoder, prompt)
                finally:
                    is_answered.set()
                killed.result()
            assert texts(answer)[0][0] == texts(wanted)[0][0]
            assert decoder.metric("mlx_parallm:prefill_peer_declined_total") == 1
        finally:
            peer.stop()
            decoder.stop()
            proxy.close()
