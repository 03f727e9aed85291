"""Which model gives rewards where a request names none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.encoder_requests import post, refused_field
from tests.fake_encoders import FakeEncoders, make_encoder

CHATS = {"chats": [[{"role": "user", "content": "w5"}]]}
SENTIMENT = {"labels": ("bad", "good")}
RELEVANCE = {"labels": ("LABEL_0",)}
REGRESSION = {"labels": ("LABEL_0",), "problem_type": "regression"}
REWARD = {"labels": ("bad", "good"), "is_reward": True}


def served(*kinds: dict[str, Any], chats: int | None = None) -> FakeEncoders:
    """Classifiers by these facts; ``chats`` is the place of the one with a chat template."""
    return FakeEncoders(
        *(
            make_encoder(f"m{place}", chats=place == chats, tasks=("classify",), **facts)
            for place, facts in enumerate(kinds)
        )
    )


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        ([SENTIMENT, RELEVANCE, REGRESSION, REWARD], "m3"),
        ([SENTIMENT, RELEVANCE, REGRESSION], "m2"),
        ([SENTIMENT, RELEVANCE], "m1"),
        ([SENTIMENT, SENTIMENT], "m0"),
        ([{"labels": ("a", "b", "c")}, SENTIMENT], "m1"),
    ],
)
async def test_what_was_likeliest_made_for_it_is_taken(kinds: Any, chosen: str) -> None:
    answer = await post(served(*kinds), "/v1/rewards/score", {"texts": ["w5"]})
    assert answer.json()["model"] == chosen


async def test_conversations_need_a_chat_template() -> None:
    models = served(REWARD, SENTIMENT, RELEVANCE, chats=1)
    for body in (CHATS, {"prompt": CHATS["chats"][0], "completions": ["w6"]}):
        assert (await post(models, "/v1/rewards/score", body)).json()["model"] == "m1"
    without = served(REWARD, SENTIMENT)
    assert refused_field(await post(without, "/v1/rewards/score", CHATS)) == (400, "chats")
    named = {**CHATS, "model": "m0"}
    assert refused_field(await post(models, "/v1/rewards/score", named)) == (400, "chats")
    three = served({"labels": ("a", "b", "c")})
    assert refused_field(await post(three, "/v1/rewards/score", CHATS)) == (400, "model")
