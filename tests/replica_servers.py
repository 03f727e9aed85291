"""Real servers that change together, on addresses that they keep when they start anew."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from mlx_parallm.api.http.listener import bind
from tests.server_process import ServerProcess

KEY = "the-key-of-the-fleet"
HEADERS = {"authorization": f"Bearer {KEY}"}
RAW = {"content-type": "application/octet-stream"}
# SMALL: a server that starts and answers quickly.
SMALL = ("--max-num-seqs", "8", "--max-model-len", "256")


class ReplicaServers:
    """Servers of one fleet; ``urls`` are their addresses in order."""

    def __init__(self, count: int, *flags: str, key: str | None = KEY) -> None:
        self._flags = (*flags, *(() if key is None else ("--admin-api-key", key)))
        self._listeners = [bind("127.0.0.1", 0) for _ in range(count)]
        ports = [listener.getsockname()[1] for listener in self._listeners]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.processes: list[ServerProcess | None] = [None] * count

    def start(self, *numbers: int) -> None:
        """Start some of them, and wait until they are like the others."""
        for number in numbers:
            self.launch(number)
        for number in numbers:
            process = self.processes[number]
            assert process is not None
            process.wait_until_ready()
        for number in numbers:
            self.wait_until_ready(number)

    def launch(self, number: int, *flags: str, env: dict[str, str] | None = None) -> ServerProcess:
        """Start one, with further flags and variables; return its process."""
        peers = ("--peers", ",".join(self.urls))
        listener = self._listeners[number]
        process = ServerProcess(*self._flags, *flags, *peers, listener=listener, env=env)
        self.processes[number] = process
        return process

    def wait_until_ready(self, number: int) -> None:
        """Return once ``/ready`` answers 200, and the server has seen all that run."""
        running = sum(process is not None for process in self.processes)
        while True:
            status = httpx2.get(f"{self.urls[number]}/ready").status_code
            rows = self.ask(number, "GET", "/v1/peers").json()["data"]
            if status == 200 and sum(row["ready"] for row in rows) >= running:
                return
            time.sleep(0.1)

    def ask(self, number: int, method: str, path: str, **options: Any) -> httpx2.Response:
        """Return a server's answer to the holder of the admin key."""
        headers = {**HEADERS, **options.pop("headers", {})}
        url = f"{self.urls[number]}{path}"
        return httpx2.request(method, url, headers=headers, timeout=None, **options)

    def post(self, number: int, path: str, **options: Any) -> dict[str, Any]:
        """Return the JSON of a server's answer, which must be good."""
        answer = self.ask(number, "POST", path, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def tokens(self, number: int, model: str | None = None) -> tuple[list[int], set[str]]:
        """Return a server's greedy tokens, and the versions that made them."""
        params = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body: dict[str, Any] = {"token_ids": list(range(40, 60)), "sampling_params": params}
        if model is not None:
            body["model"] = model
        choice = self.post(number, "/inference/v1/generate", json=body)["choices"][0]
        return choice["token_ids"], {span["version"] for span in choice["weight_versions"]}

    def check_alike(self) -> None:
        """Check that all have the same weights and adapters, under the same labels."""
        states = [self._state(number) for number in range(len(self.urls))]
        assert states[1:] == states[:-1]

    def _state(self, number: int) -> object:
        body = {"action": "checksum"}
        sums = self.post(number, "/weight_checker", json=body)["checksums"]
        adapters = self.ask(number, "GET", "/v1/adapters").json()["data"]
        digests = {card["name"]: (card["version"], card["digest"]) for card in adapters}
        label = self.ask(number, "GET", "/weight_info").json()["weight_version"]
        return label, sums, digests, self.ask(number, "GET", "/is_paused").json()

    def kill(self, number: int) -> None:
        """End one at once."""
        process = self.processes[number]
        assert process is not None
        process.process.kill()
        process.process.wait()
        self.processes[number] = None

    def stop(self) -> None:
        """End all."""
        for process in self.processes:
            if process is not None:
                process.stop()
        for listener in self._listeners:
            listener.close()


@contextmanager
def replicas(count: int, *flags: str, key: str | None = KEY) -> Iterator[ReplicaServers]:
    """Provide servers of one fleet that are ready."""
    servers = ReplicaServers(count, *flags, key=key)
    try:
        servers.start(*range(count))
        yield servers
    finally:
        servers.stop()
