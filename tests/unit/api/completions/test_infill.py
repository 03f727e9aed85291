"""Fill-in-the-middle: what the model is given, and what ends its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from mlx_parallm.api.completions.infill import FORMATS, InfillFormat, infill_ids
from mlx_parallm.api.completions.schema import CompletionRequest
from mlx_parallm.types.token_limit import TokenLimit
from tests.fake_engine import FakeEngine, serve_fake
from tests.fakes import ByteTokenizer

QWEN, CODE_LLAMA, CODESTRAL = FORMATS[0], FORMATS[3], FORMATS[5]


class InfillTokenizer(ByteTokenizer):
    """Bytes, and the tokens of a format from 1 on; ``bos`` begins a text, and a space if asked."""

    def __init__(self, form: InfillFormat, *, bos: bool = False, spaces: bool = False) -> None:
        marks = (form.prefix, form.suffix, form.middle, *form.ends)
        self._ids = {mark: number for number, mark in enumerate(marks, start=1) if mark}
        self._bos, self._spaces = bos, spaces

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: TokenLimit | None = None
    ) -> list[int]:
        begin = [20] if self._bos and add_special_tokens else []
        return begin + ([32] if self._spaces and text else []) + list(text.encode())


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.prefix)
def test_every_format_has_its_parts_in_order(form: InfillFormat) -> None:
    ids = infill_ids("ab", "yz", InfillTokenizer(form), add_special_tokens=True)
    before, after = (1, *b"ab"), (2, *b"yz")
    expected = after + before if form.suffix_first else before + after
    assert ids == expected + ((3,) if form.middle else ())


@pytest.mark.parametrize(("special", "begin"), [(True, (20,)), (False, ())])
def test_the_text_begins_once_and_the_suffix_does_not(special: bool, begin: tuple[int]) -> None:
    tokenizer = InfillTokenizer(CODE_LLAMA, bos=True, spaces=True)
    ids = infill_ids("ab", "yz", tokenizer, add_special_tokens=special)
    assert ids == (*begin, 1, *b" ab", 2, *b"yz", 3)
    tokenizer = InfillTokenizer(CODESTRAL, bos=True)
    ids = infill_ids("ab", "yz", tokenizer, add_special_tokens=special)
    assert ids == (*begin, 2, *b"yz", 1, *b"ab")


def test_nothing_may_stand_before_the_gap() -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "", "suffix": "yz"})
    assert body.prompts() == [""]
    assert infill_ids("", "yz", InfillTokenizer(QWEN), add_special_tokens=True) == (1, 2, *b"yz", 3)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine(InfillTokenizer(QWEN))
    with serve_fake(engine) as url:
        yield engine, url


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    with serve_fake(FakeEngine()) as url:
        yield url


def complete(url: str, **body: Any) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        answer = client.completions.create(model="alias", **body)
        # A stream must be read before its client is closed.
        return list(answer) if body.get("stream") else answer


@pytest.mark.parametrize("stream", [False, True])
def test_echo_is_of_the_prompt_alone(served: tuple[FakeEngine, str], stream: bool) -> None:
    engine, url = served
    answer = complete(url, prompt="ab", suffix="yz", echo=True, stream=stream)
    parts = answer if stream else [answer]
    assert "".join(part.choices[0].text for part in parts) == "abhello"
    request = engine.submitted.get()
    assert request.prompt_ids == (1, *b"ab", 2, *b"yz", 3)
    assert request.params.stop_token_ids == (4, 5, 6, 7, 8)


def test_every_prompt_gets_the_suffix(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    complete(url, prompt=["a", "b"], suffix="z", n=2, extra_body={"ignore_eos": True})
    requests = [engine.submitted.get() for _ in range(2)]
    assert [r.prompt_ids for r in requests] == [(1, c, 2, *b"z", 3) for c in b"ab"]
    assert requests[0].params.stop_token_ids == ()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, 2], "suffix": "z"}, "prompt"),
        ({"prompt": [[1, 2]], "suffix": "z"}, "prompt"),
        ({"prompt": "a", "suffix": 7}, "suffix"),
        ({"prompt": "a", "suffix": "z", "echo": True, "logprobs": 1}, "echo"),
    ],
)
def test_what_cannot_be_filled_in_names_its_field(
    served: tuple[FakeEngine, str], body: dict[str, Any], param: str
) -> None:
    response = httpx2.post(f"{served[1]}/v1/completions", json={"model": "alias"} | body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_model_without_the_tokens_refuses_a_suffix_but_not_an_empty_one(plain: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(plain, prompt="a", suffix="z")
    assert refusal.value.param == "suffix"
    assert complete(plain, prompt="a", suffix="").choices[0].text == "hello"


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_suffix_fills_in_too(served: tuple[FakeEngine, str], stream: bool) -> None:
    engine, url = served
    body = {"model": "alias", "prompt": "ab", "suffix": "yz", "stream": stream}
    answer = httpx2.post(f"{url}/api/generate", json=body)
    texts = [json.loads(line)["response"] for line in answer.text.splitlines()]
    assert "".join(texts) == "hello"
    request = engine.submitted.get()
    assert request.prompt_ids == (1, *b"ab", 2, *b"yz", 3)
    assert set(request.params.stop_token_ids) == set(range(4, 4 + len(QWEN.ends)))
    shown = httpx2.post(f"{url}/api/show", json={"model": "alias"}).json()
    assert "insert" in shown["capabilities"]
