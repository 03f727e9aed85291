"""PDF files in messages, by Anthropic's client, over a scripted engine that sees nothing."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from mlx_parallm.types.request import GenerateRequest
from tests.fake_engine import FakeEngine, serve_fake, write
from tests.pdf_files import encrypted, pdf_of

GO: Any = {"role": "user", "content": "go"}
CALL: Any = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.script = write("hello")
    return engine


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[anthropic.Anthropic]:
    with (
        serve_fake(engine) as url,
        anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client,
    ):
        yield client


def document(file: bytes, **more: Any) -> Any:
    source = {"type": "base64", "media_type": "application/pdf", "data": b64encode(file).decode()}
    return {"type": "document", "source": source | more}


def ask(client: anthropic.Anthropic, *messages: Any) -> anthropic.types.Message:
    return client.messages.create(model="alias", max_tokens=20, messages=list(messages))


def in_result(block: Any) -> list[Any]:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block]}
    return [GO, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("nested", [False, True], ids=["user", "result"])
def test_the_text_of_a_file_is_read(
    engine: FakeEngine, client: anthropic.Anthropic, nested: bool
) -> None:
    block = document(pdf_of("one", "two")) | {"title": "t"}
    messages: Any = in_result(block) if nested else [{"role": "user", "content": [block]}]
    answer = ask(client, *messages)
    request = engine.submitted.get_nowait()
    assert isinstance(request, GenerateRequest)
    prompt = bytes(request.prompt_ids).decode()
    assert "<document>\n<title>t</title>\none\n\ntwo\n</document>" in prompt
    usage = answer.usage
    counted = client.messages.count_tokens(model="alias", messages=messages)
    assert counted.input_tokens == len(request.prompt_ids) >= usage.input_tokens


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (document(b"PK\x03\x04"), "content.0.source: The file is no PDF file"),
        (document(encrypted()), "content.0.source: The PDF file is encrypted"),
        (document(pdf_of("x")[:99]), "content.0.source: The PDF file is truncated"),
        (document(pdf_of("")), "content.0.source is a PDF file without text, and the model"),
        (document(b"", data="%%%"), "content.0.source: The data are not valid base64"),
        (document(b"x", media_type="text/plain"), "source.media_type must be application/pdf"),
        (document(b"x", data=7), "content.0.source.data must be a text"),
        (document(b"x", data=""), "content.0.source.data must be a text"),
        (document(b"x", type="url"), "content.0.source.url must be a text"),
        (document(b"x", type="url", url="http://127.0.0.1/a.pdf"), "content.0.source: "),
    ],
)
def test_a_bad_file_is_named(client: anthropic.Anthropic, block: Any, words: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, GO, {"role": "user", "content": [block]})
    assert words in caught.value.message
    assert "messages.1.content.0" in caught.value.message
    with pytest.raises(anthropic.BadRequestError, match="source"):
        ask(client, *in_result(block))
