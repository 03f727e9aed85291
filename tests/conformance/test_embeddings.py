"""Embeddings by langchain and litellm, of a small model whose tokens are words ``w5`` and so on."""

from __future__ import annotations

import math
from typing import Any

import litellm
import pytest
from langchain_openai import OpenAIEmbeddings
from openai import BadRequestError

TEXTS = ["w5 w6", "w7", "w5 w6"]


@pytest.fixture
def options(embedder: Any) -> dict[str, Any]:
    return {
        "model": embedder.model,
        "base_url": embedder.base_url,
        "api_key": embedder.api_key,
        # Otherwise it sends the ids of OpenAI's tokenizer.
        "check_embedding_ctx_length": False,
    }


def check(vectors: Any) -> None:
    assert [len(vector) for vector in vectors] == [32, 32, 32]
    assert vectors[0] == vectors[2] != vectors[1]
    for vector in vectors:
        assert math.isclose(math.hypot(*vector), 1, abs_tol=1e-5)


async def test_langchain(options: dict[str, Any]) -> None:
    client = OpenAIEmbeddings(**options)
    vectors = client.embed_documents(TEXTS)
    check(vectors)
    assert client.embed_query(TEXTS[1]) == pytest.approx(vectors[1], abs=1e-6)
    check(await client.aembed_documents(TEXTS))
    # A request for each two texts.
    check(OpenAIEmbeddings(**options, chunk_size=2).embed_documents(TEXTS))


def test_langchain_is_told_what_is_wrong(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="numbers"):
        OpenAIEmbeddings(**options, dimensions=5).embed_query("w5")
    with pytest.raises(BadRequestError, match="maximum context length"):
        OpenAIEmbeddings(**options).embed_query("w5 " * 100)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_litellm(embedder: Any, form: str) -> None:
    answer = litellm.embedding(
        model=f"openai/{embedder.model}",
        api_base=embedder.base_url,
        api_key=embedder.api_key,
        input=TEXTS,
        encoding_format=form,
    )
    assert len(answer.data) == len(TEXTS)
    assert answer.usage.prompt_tokens == 11
    if form == "float":
        check([item["embedding"] for item in answer.data])
