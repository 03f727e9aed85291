"""A client's bodies come through at a bounded rate beside others."""

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from mlx_parallm.api.http.body_budget import (
    BURST_BYTES,
    BYTES_PER_S,
    BodyBudgetMiddleware,
)
from mlx_parallm.fairness import ClientPace
from mlx_parallm.server_config import ServerConfig
from tests.api_app import scope_of

SIZES = st.integers(0, 3 * BURST_BYTES)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def body_pace(clock: Clock) -> ClientPace:
    return ClientPace(clock, rate=BYTES_PER_S, burst=BURST_BYTES)


@given(st.lists(st.tuples(st.floats(0, 1), SIZES), max_size=20))
def test_no_more_than_the_rate_and_the_burst_comes_through(
    arrivals: list[tuple[float, int]],
) -> None:
    clock, through = Clock(), []
    pace = body_pace(clock)
    with pace.present("normal"), pace.present("hostile"):
        for pause_s, size in arrivals:
            clock.now_s += pause_s
            through.append((clock.now_s + pace.delay("hostile", size), size))
            assert pace.delay("normal", 0) == 0
    for first in range(len(through)):
        for last in range(first, len(through)):
            came = sum(size for _, size in through[first + 1 : last + 1])
            span_s = through[last][0] - through[first][0]
            # What came with the first may have used up nothing of the burst.
            assert came <= span_s * BYTES_PER_S + BURST_BYTES + through[first][1] + 1


@given(st.lists(SIZES, max_size=20))
def test_who_is_alone_never_waits_and_owes_nothing_later(sizes: list[int]) -> None:
    pace = body_pace(Clock())
    with pace.present("one"):
        assert not any(pace.delay("one", size) for size in sizes)
        with pace.present("two"):
            assert pace.delay("one", BURST_BYTES) == 0


def test_who_comes_slowly_enough_never_waits() -> None:
    clock = Clock()
    pace = body_pace(clock)
    with pace.present("one"), pace.present("two"):
        for _ in range(100):
            assert pace.delay("one", BURST_BYTES) == 0
            clock.now_s += BURST_BYTES / BYTES_PER_S + 1e-6


def test_a_debt_outlives_the_request_and_then_is_forgotten() -> None:
    clock = Clock()
    pace = body_pace(clock)
    with pace.present("other"):
        with pace.present("one"):
            assert pace.delay("one", 2 * BURST_BYTES) == pytest.approx(BURST_BYTES / BYTES_PER_S)
        with pace.present("one"):
            assert pace.delay("one", 0) > 0
            clock.now_s += 10
        assert pace._empty_s == {}


def test_requests_are_counted() -> None:
    pace = body_pace(Clock())
    with ExitStack() as stack:
        stack.enter_context(pace.present("one"))
        with pace.present("one"):
            assert pace.delay("one", 9 * BURST_BYTES) == 0
        stack.enter_context(pace.present("two"))
        assert pace.delay("one", 9 * BURST_BYTES) > 0
    assert not pace._here


async def test_the_others_run_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    pace = body_pace(Clock())
    with pace.present("one"), pace.present("two"):
        await pace.wait("one", 3 * BURST_BYTES)
        await pace.wait("two", 100)
    assert slept == [pytest.approx(2 * BURST_BYTES / BYTES_PER_S)]


@pytest.mark.parametrize(
    ("path", "kind", "is_held_back"),
    [
        ("/v1/chat/completions", "application/json", True),
        ("/v1/chat/completions", "application/x-safetensors", True),
        ("/v1/update_adapter_weights", "application/json", False),
        ("/v1/files", "", False),
        ("/v1/rl/act", "application/json", True),
        ("/v1/rl/act", "Application/X-Safetensors; a=b", False),
    ],
)
async def test_every_piece_of_a_json_body_is_held_back_beside_another_client(
    monkeypatch: pytest.MonkeyPatch, path: str, kind: str, is_held_back: bool
) -> None:
    slept, ends = [], asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(round(seconds * BYTES_PER_S))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/wait":
            await ends.wait()
        while (await receive()).get("more_body"):
            pass

    async def call(path: str, key: str, pieces: list[bytes]) -> None:
        async def receive() -> Message:
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

        headers = [
            (b"authorization", f"Bearer {key}".encode()),
            (b"content-type", kind.encode()),
        ]
        await middleware(scope_of(path, headers=headers), receive, send)

    async def send(_: Message) -> None: ...

    middleware = BodyBudgetMiddleware(app, ServerConfig(api_keys=("one", "two")))
    middleware._pace = body_pace(Clock())
    other = asyncio.ensure_future(call("/wait", "two", [b""]))
    await asyncio.sleep(0)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await call(path, "one", [bytes(BURST_BYTES), bytes(100), bytes(10)])
    assert slept == ([100, 110] if is_held_back else [])
    ends.set()
    await other
