"""Encoder-decoders by clients that know tasks, and by those that complete texts."""

from __future__ import annotations

from typing import Any

import litellm
import pytest
from huggingface_hub import InferenceClient
from langchain_openai import OpenAI as LangchainOpenAI
from openai import BadRequestError, OpenAI

SOURCE = "t5 t6 t7"
LENGTH = 8


def task_client(translator: Any) -> InferenceClient:
    return InferenceClient(f"{translator.url}/models/{translator.model}", token=translator.api_key)


@pytest.fixture
def text(translator: Any) -> str:
    return task_client(translator).text_generation(SOURCE, max_new_tokens=LENGTH)


def test_tasks_of_hugging_face(translator: Any, text: str) -> None:
    client, options = task_client(translator), {"max_new_tokens": LENGTH}
    assert len(text.split("t")) == LENGTH + 1
    assert client.translation(SOURCE, generate_parameters=options).translation_text == text
    assert client.summarization(SOURCE, generate_parameters=options).summary_text == text
    stream = client.text_generation(SOURCE, max_new_tokens=LENGTH, stream=True)
    assert "".join(stream) == text
    details = client.text_generation(SOURCE, max_new_tokens=LENGTH, details=True).details
    assert details.generated_tokens == LENGTH


def test_completions_of_openai(translator: Any, text: str) -> None:
    client = OpenAI(base_url=translator.base_url, api_key=translator.api_key, max_retries=0)
    fields = {"model": translator.model, "temperature": 0, "max_tokens": LENGTH}
    answer = client.completions.create(prompt=SOURCE, **fields)
    assert answer.choices[0].text == text
    with client.completions.create(prompt=SOURCE, stream=True, **fields) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == text
    with pytest.raises(BadRequestError, match="/v1/completions"):
        client.chat.completions.create(
            model=translator.model, messages=[{"role": "user", "content": SOURCE}]
        )


def test_completions_of_langchain(translator: Any, text: str) -> None:
    model = LangchainOpenAI(
        model=translator.model,
        base_url=translator.base_url,
        api_key=translator.api_key,
        temperature=0,
        max_tokens=LENGTH,
    )
    assert model.invoke(SOURCE) == text
    assert "".join(model.stream(SOURCE)) == text
    assert model.batch([SOURCE, SOURCE]) == [text, text]


def test_completions_of_litellm(translator: Any, text: str) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{translator.model}",
        prompt=SOURCE,
        api_base=translator.base_url,
        api_key=translator.api_key,
        temperature=0,
        max_tokens=LENGTH,
    )
    assert answer.choices[0].text == text
