"""Requests that go through a balancer, and what the servers behind it have counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Semaphore
from typing import Any

import httpx2

from tests.scaleout.balancers import HEADERS
from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
DONE = "data: [DONE]"
LOST = "lost"
ENDED = re.compile(r'^vllm:request_success_total{.*finished_reason="(\w+)".*} (\S+)$', re.MULTILINE)


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return the body of a completion of so many tokens."""
    return {
        "model": MODEL,
        "prompt": "1, 2, 3,",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **fields,
    }


def complete(url: str, session: tuple[str, str], max_tokens: int = 1) -> int:
    """Return the status of a whole answer; ``session`` is a header and its value."""
    headers = HEADERS | dict([session])
    return httpx2.post(f"{url}/v1/completions", json=body(max_tokens), headers=headers).status_code


def stream(url: str, session: tuple[str, str], max_tokens: int, begun: Semaphore) -> str:
    """Return the last line of a stream, ``LOST`` if it was cut, or its status if that is not 200.

    ``begun`` is released at its first line, or at its end.
    """
    headers, request = HEADERS | dict([session]), body(max_tokens, stream=True)
    try:
        with httpx2.stream(
            "POST", f"{url}/v1/completions", json=request, headers=headers
        ) as response:
            if response.status_code != 200:
                return str(response.status_code)
            return last_of(released(response.iter_lines(), begun))
    except httpx2.TransportError:
        return LOST
    finally:
        begun.release()


def released(lines: Iterator[str], begun: Semaphore) -> Iterator[str]:
    """Yield the lines that are not empty; release the semaphore at the first."""
    for number, line in enumerate(filter(None, lines)):
        if not number:
            begun.release()
        yield line


def last_of(lines: Iterable[str]) -> str:
    """Return the last line; an empty text if there is none."""
    last = ""
    for line in lines:
        last = line
    return last


def ended_by(server: ServerProcess) -> Counter[str]:
    """Return how many samples a server has finished, by reason; clients that leave are "abort"."""
    counts = Counter[str]()
    for reason, count in ENDED.findall(httpx2.get(f"{server.url}/metrics").text):
        counts[reason] += int(float(count))
    return counts


@contextmanager
def counting(servers: list[ServerProcess]) -> Iterator[list[int]]:
    """Yield a list that has, after the block, the samples that each server finished in it."""
    before = [ended_by(server).total() for server in servers]
    counts: list[int] = []
    yield counts
    counts += [ended_by(each).total() - count for each, count in zip(servers, before, strict=True)]
