"""A conversation that is too long loses its oldest messages, and no more than it must."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.turns.prepare import prepare_turn
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.api.turns.truncation import prepare_fitting
from mlx_parallm.types.request import SamplingParams
from tests.fake_engine import FakeEngine

SPACE = 256


def turn(messages: list[dict[str, Any]], max_tokens: int | None = None) -> TurnRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return TurnRequest(request_id="r", messages=messages, params=params)


def say(role: str, size: int) -> dict[str, Any]:
    return {"role": role, "content": "x" * size}


@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=8),
    max_tokens=st.none() | st.integers(1, 100),
)
async def test_the_fewest_messages_are_left_out(sizes: list[int], max_tokens: int | None) -> None:
    model = FakeEngine().get_model("alias")
    messages = [say("system", 10)]
    for size in sizes:
        messages += [say("user", size), say("assistant", size)]
    request = turn(messages, max_tokens)
    fitted = await prepare_fitting(request, model)
    kept = list(fitted.turn.messages)
    space = SPACE - (max_tokens or 1)
    assert kept[0] == messages[0]
    assert kept[1:] == messages[len(messages) - len(kept) + 1 :]
    assert kept[1]["role"] == "user"
    assert len(fitted.prompt_ids) <= space or len(kept) == 3
    if len(kept) < len(messages):
        more = [messages[0], *messages[len(messages) - len(kept) - 1 :]]
        assert len((await prepare_turn(replace(request, messages=more), model)).prompt_ids) > space


async def test_what_fits_stays_as_it_is() -> None:
    model = FakeEngine().get_model("alias")
    messages = [say("user", 5), say("system", 5), say("user", 5)]
    assert (await prepare_fitting(turn(messages), model)).turn.messages == messages
