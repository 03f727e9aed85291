"""``truncate_prompt_tokens``: prompts are cut as asked, or the field is refused, on every route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest

from mlx_parallm.api.http.forms import NEVER_DROPPED, NullIsAbsent
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.token_limit import TokenLimit
from tests.e2e.test_ignored_fields import all_routes
from tests.fake_engine import FakeEngine, serve_fake
from tests.fakes import ByteTokenizer

TEXT = "/v1/completions"
CONTEXT = 256
BOS = 0
HI = [{"role": "user", "content": "abcdefgh"}]
TURN = b"user: abcdefgh\n"
TURNS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "abcdefgh"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
}


class BeginningTokenizer(ByteTokenizer):
    """Puts a special token before every text that shall have them."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: TokenLimit | None = None
    ) -> list[int]:
        ids = super().encode(text, limit=limit)
        return [BOS, *ids] if add_special_tokens else ids


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(BeginningTokenizer())


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with serve_fake(engine) as url:
        yield url


def prompt_of(engine: FakeEngine, url: str, path: str, **body: Any) -> Sequence[int]:
    answer = httpx2.post(url + path, json=body)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    return engine.submitted.get().prompt_ids


@pytest.mark.parametrize(
    ("side", "kept"), [({}, b"gh"), ({"truncation_side": "left"}, b"gh"), ("right", b"ab")]
)
def test_a_text_keeps_its_special_tokens(
    engine: FakeEngine, url: str, side: Any, kept: bytes
) -> None:
    more = {"truncation_side": side} if isinstance(side, str) else side
    body = {"prompt": "abcdefgh", "truncate_prompt_tokens": 3} | more
    assert prompt_of(engine, url, TEXT, **body) == (BOS, *kept)
    body["add_special_tokens"] = False
    assert len(prompt_of(engine, url, TEXT, **body)) == 3


def test_token_ids_are_cut_as_they_are(engine: FakeEngine, url: str) -> None:
    body: dict[str, Any] = {"prompt": [BOS, 1, 2, 3, 4], "truncate_prompt_tokens": 2}
    assert prompt_of(engine, url, TEXT, **body) == (3, 4)
    assert prompt_of(engine, url, TEXT, **body, truncation_side="right") == (BOS, 1)
    body["truncate_prompt_tokens"] = 5
    assert prompt_of(engine, url, TEXT, **body) == (BOS, 1, 2, 3, 4)


def test_minus_one_leaves_room_for_max_tokens(engine: FakeEngine, url: str) -> None:
    body: dict[str, Any] = {"prompt": [7] * 1000, "truncate_prompt_tokens": -1}
    assert len(prompt_of(engine, url, TEXT, **body, max_tokens=40)) == CONTEXT - 40
    body = {"messages": [{"role": "user", "content": "x" * 1000}], "truncate_prompt_tokens": -1}
    assert len(prompt_of(engine, url, "/v1/chat/completions", **body)) == CONTEXT - 1


def test_an_echo_is_what_the_model_read(url: str) -> None:
    body = {"prompt": "abcdefgh", "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 0}
    body |= {"add_special_tokens": False, "return_token_ids": True}
    (choice,) = httpx2.post(url + TEXT, json=body).json()["choices"]
    assert (choice["text"], choice["prompt_token_ids"]) == ("fgh", [*b"fgh"])


@pytest.mark.parametrize("path", TURNS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_conversations_are_cut_too(engine: FakeEngine, url: str, path: str, side: str) -> None:
    body = TURNS[path] | {"truncate_prompt_tokens": 5, "truncation_side": side}
    kept = TURN[-5:] if side == "left" else TURN[:5]
    assert prompt_of(engine, url, path, **body) == tuple(kept)


@pytest.mark.parametrize("number", [0, -2, CONTEXT - 15])
def test_what_leaves_no_room_is_refused(url: str, number: int) -> None:
    body = {"prompt": "abc", "truncate_prompt_tokens": number, "max_tokens": 16}
    answer = httpx2.post(url + TEXT, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "a", "suffix": "b"}),
        ("/v1/rl/rollout", {"prompts": ["hi"]}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
        ("/generate", {"text": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/v1/messages/count_tokens", {"messages": HI}),
    ],
)
def test_other_routes_refuse_it(url: str, path: str, body: dict[str, Any]) -> None:
    answer = httpx2.post(url + path, json=body | {"truncate_prompt_tokens": 1})
    assert answer.status_code == 400, answer.text
    assert "truncate_prompt_tokens" in answer.text


@pytest.mark.parametrize("name", sorted(NEVER_DROPPED))
def test_no_form_drops_what_changes_the_input(name: str) -> None:
    declared = {getattr(route, "form", None) for route in all_routes()}
    forms = [form for form in declared if form is not None]
    assert len(forms) > 30
    for form in forms:
        assert issubclass(form, NullIsAbsent), form
        if name not in form.model_fields:
            with pytest.raises(InvalidRequestError) as refusal:
                form.model_validate({name: 1})
            assert refusal.value.param == name
