"""``prompt_embeds`` by the real client: rows give the tokens of ids, and bad ones are refused."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import pytest
from mlx_lm.utils import load_model
from openai.types import Completion
from safetensors.numpy import save

from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_NAME
from mlx_parallm.tokenizer.loading import load_tokenizer
from tests.server_process import ServerProcess

QUESTIONS = ("What is 17 + 25?", "Repeat this text: the quick brown fox", "Sort these: 9 4 7")


class Rows:
    """The rows of the demo model's embedding."""

    def __init__(self) -> None:
        self._model: Any = load_model(DEMO_FOLDER)[0]
        self._tokenizer = load_tokenizer(DEMO_FOLDER)
        self.texts = [self._turn(question) for question in QUESTIONS]

    def _turn(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return self._tokenizer.render_chat(messages, add_generation_prompt=True)

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def of(self, text: str) -> np.ndarray:
        rows = self._model.model.embed_tokens(mx.array(self.ids(text)))
        return np.array(rows.astype(mx.float32))

    def base64(self, text: str, *, as_npy: bool = False) -> str:
        return encoded(self.of(text), as_npy=as_npy)


def encoded(rows: np.ndarray, *, as_npy: bool = False) -> str:
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return base64.b64encode(buffer.getvalue() if as_npy else save({"rows": rows})).decode()


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    running = ServerProcess(
        "--enable-prompt-embeds", "--max-num-batched-tokens", "64", "--max-model-len", "512"
    )
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(client: openai.OpenAI, prompt: Any = "", **fields: Any) -> Completion:
    embeds = {name: fields.pop(name) for name in ("prompt_embeds", "echo") if name in fields}
    return client.completions.create(
        model=DEMO_NAME, prompt=prompt, temperature=0, max_tokens=12, extra_body=embeds, **fields
    )


@pytest.mark.parametrize("as_npy", [False, True])
def test_rows_give_the_text_of_ids(client: openai.OpenAI, rows: Rows, as_npy: bool) -> None:
    for text in rows.texts:
        wanted = complete(client, rows.ids(text))
        answer = complete(client, prompt_embeds=rows.base64(text, as_npy=as_npy))
        assert answer.choices[0].text == wanted.choices[0].text != ""
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(rows.ids(text))


def test_many_at_once_beside_texts_longer_than_a_step(client: openai.OpenAI, rows: Rows) -> None:
    long = [text * 12 for text in rows.texts]
    wanted = [complete(client, rows.ids(text)).choices[0].text for text in long]

    def ask(number: int) -> str:
        place = number % len(long)
        if number % 2:
            return complete(client, rows.ids(long[place])).choices[0].text
        return complete(client, prompt_embeds=rows.base64(long[place])).choices[0].text

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, range(12)))
    assert texts == [wanted[number % len(long)] for number in range(12)]


def test_rows_are_found_in_the_prefix_cache(client: openai.OpenAI, rows: Rows) -> None:
    body = rows.base64("Say hello. " * 20)
    first, second = (complete(client, prompt_embeds=body) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 64


def test_several_prompts_answer_rows_first(client: openai.OpenAI, rows: Rows) -> None:
    embeds = [rows.base64(text) for text in rows.texts[:2]]
    answer = complete(client, rows.texts[2], prompt_embeds=embeds, n=2, seed=1)
    wanted = [complete(client, rows.ids(text)).choices[0].text for text in rows.texts]
    assert [choice.text for choice in answer.choices] == [text for text in wanted for _ in "ab"]


def test_a_stream_gives_the_same(client: openai.OpenAI, rows: Rows) -> None:
    stream = client.completions.create(
        model=DEMO_NAME, prompt="", temperature=0, max_tokens=12, stream=True,
        extra_body={"prompt_embeds": rows.base64(rows.texts[0])},
    )  # fmt: skip
    text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text == complete(client, rows.texts[0]).choices[0].text


def bad_rows(rows: Rows) -> dict[str, str]:
    good = rows.of(rows.texts[0])
    not_finite = good.copy()
    not_finite[0, 0] = np.nan
    pickled = io.BytesIO()
    np.save(pickled, np.array([[{}]], dtype=object), allow_pickle=True)
    return {
        "NaN": encoded(not_finite),
        "wrong width": encoded(good[:, :-1]),
        "too long": encoded(np.zeros((600, good.shape[1]), np.float16)),
        "no rows": encoded(good[:0]),
        "objects": base64.b64encode(pickled.getvalue()).decode(),
        "no base64": "%%%",
    }


def test_bad_rows_are_refused_by_name_and_the_server_goes_on(
    client: openai.OpenAI, rows: Rows
) -> None:
    for problem, text in bad_rows(rows).items():
        for embeds in (text, [rows.base64(rows.texts[0]), text]):
            with pytest.raises(openai.BadRequestError) as refused:
                complete(client, prompt_embeds=embeds)
            assert refused.value.param == "prompt_embeds", problem
    for field in ({"echo": True}, {"suffix": "x"}):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, prompt_embeds=rows.base64(rows.texts[0]), **field)
        assert refused.value.param == next(iter(field))
    assert complete(client, rows.texts[0]).choices[0].text


def test_batch_files_take_rows_and_name_bad_ones(client: openai.OpenAI, rows: Rows) -> None:
    bodies = {"good": rows.base64(rows.texts[0]), **bad_rows(rows)}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": DEMO_NAME,
                "temperature": 0,
                "max_tokens": 12,
                "prompt_embeds": embeds,
            },
        }
        for name, embeds in bodies.items()
    ]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed"):
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    (line,) = client.files.content(batch.output_file_id).text.splitlines()
    text = json.loads(line)["response"]["body"]["choices"][0]["text"]
    assert text == complete(client, rows.texts[0]).choices[0].text
    errors = [
        json.loads(each) for each in client.files.content(batch.error_file_id).text.splitlines()
    ]
    assert {each["custom_id"] for each in errors} == bodies.keys() - {"good"}
    for each in errors:
        assert each["response"]["status_code"] == 400
        assert each["response"]["body"]["error"]["param"] == "prompt_embeds"


def test_it_is_off_unless_asked_for(live_server: ServerProcess, rows: Rows) -> None:
    client = openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="--enable-prompt-embeds") as refused:
        complete(client, prompt_embeds=rows.base64(rows.texts[0]))
    assert refused.value.param == "prompt_embeds"
