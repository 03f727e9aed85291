"""Encoder-decoders by langchain's package for Hugging Face, which speaks TGI's form."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_huggingface import HuggingFaceEndpoint

SOURCE = "t5 t6 t7"
LENGTH = 8


@pytest.fixture
def model(translator: Any) -> HuggingFaceEndpoint:
    return endpoint(translator)


def endpoint(translator: Any, **options: Any) -> HuggingFaceEndpoint:
    return HuggingFaceEndpoint(
        endpoint_url=f"{translator.url}/models/{translator.model}",
        # It sends its own token to Hugging Face's servers alone.
        server_kwargs={"headers": {"Authorization": f"Bearer {translator.api_key}"}},
        max_new_tokens=LENGTH,
        **options,
    )


def test_a_text(model: HuggingFaceEndpoint) -> None:
    text = model.invoke(SOURCE)
    assert len(text.split("t")) == LENGTH + 1
    assert model.batch([SOURCE, SOURCE]) == [text, text]


def test_a_stream(model: HuggingFaceEndpoint) -> None:
    pieces = list(model.stream(SOURCE))
    assert "".join(pieces) == model.invoke(SOURCE)
    # One event may bring several tokens.
    assert 1 < len(pieces) <= LENGTH


async def test_without_blocking(model: HuggingFaceEndpoint) -> None:
    assert await model.ainvoke(SOURCE) == model.invoke(SOURCE)
    pieces = [piece async for piece in model.astream(SOURCE)]
    assert "".join(pieces) == model.invoke(SOURCE)


def test_samples_are_repeated_by_their_seed(translator: Any) -> None:
    first, again = (
        endpoint(translator, do_sample=True, typical_p=1.0, seed=3).invoke(SOURCE) for _ in range(2)
    )
    assert first == again
