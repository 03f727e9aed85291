"""Ollama's routes of the embedded models, by its own client."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import numpy as np
import ollama
import openai
import pytest
from PIL import Image, ImageDraw

from tests.server_process import ServerProcess

MODEL, SEES, EMBEDS = "mlx-parallm-demo", "demo:see", "demo:embed"
SUM = [{"role": "user", "content": "What is 17 + 25?"}]
PARIS: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY = {"temperature": 0}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
RESULT = '{"temperature": 21, "sky": "clear"}'


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--model", MODEL, SEES, EMBEDS)
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as api:
        yield api


def get_weather(city: str) -> None:
    """Get the current weather in a city.

    Args:
        city: the city.
    """


def red_disc() -> bytes:
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).ellipse((12, 12, 76, 76), fill="red")
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def chat(client: ollama.Client, messages: Any, **more: Any) -> ollama.ChatResponse:
    """Return a greedy answer, which is the same whole and streamed."""
    fields: dict[str, Any] = {"model": MODEL, "messages": messages, "options": GREEDY} | more
    whole = client.chat(**fields)
    *pieces, last = client.chat(**fields, stream=True)
    assert [piece.done for piece in pieces] == [False] * len(pieces)
    assert (last.done, last.done_reason) == (True, whole.done_reason)
    assert (last.eval_count, last.prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)
    messages = [piece.message for piece in (*pieces, last)]
    assert "".join(each.content or "" for each in messages) == whole.message.content
    assert "".join(each.thinking or "" for each in messages) == (whole.message.thinking or "")
    calls = [call.function for each in messages for call in each.tool_calls or ()]
    assert calls == [call.function for call in whole.message.tool_calls or ()]
    return whole


def test_an_answer_with_its_thoughts_counts_and_times(client: ollama.Client) -> None:
    answer = chat(client, SUM)
    assert (answer.model, answer.message.role, answer.message.content) == (
        MODEL,
        "assistant",
        "17 + 25 = 42",
    )
    assert answer.message.thinking
    assert answer.done_reason == "stop"
    times = (answer.total_duration, answer.prompt_eval_duration, answer.eval_duration)
    assert all(each and each > 0 for each in times)
    assert chat(client, SUM, think=False).message.thinking is None


def test_a_call_its_result_and_the_answer(client: ollama.Client) -> None:
    answer = chat(client, PARIS, tools=[get_weather])
    (call,) = answer.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_name": "get_weather", "content": RESULT}
    answered = chat(client, [*PARIS, answer.message, result], tools=[get_weather])
    assert "21" in (answered.message.content or "")


def test_a_history_of_openais_client_is_read(server: ServerProcess) -> None:
    """Programs send arguments as JSON, contents as parts, and ids beside the results."""
    call = {"id": "x1", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": PARIS[0]["content"]}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x1", "name": "get_weather", "content": RESULT},
    ]
    answer = post(server, "chat", model=MODEL, messages=messages, tools=[TOOL], options=GREEDY)
    assert "21" in answer["message"]["content"]


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"], ids=["base64", "data"])
def test_images_of_messages_and_prompts(server: ServerProcess, prefix: str) -> None:
    image = prefix + base64.b64encode(red_disc()).decode()
    fields = {"model": SEES, "options": GREEDY}
    message = {"role": "user", "content": "What colour is it?", "images": [image]}
    assert post(server, "chat", **fields, messages=[message])["message"]["content"] == "red"
    prompt = {"prompt": "What colour is it?", "images": [image]}
    assert post(server, "generate", **fields, **prompt)["response"] == "red"


async def test_the_asynchronous_client(server: ServerProcess) -> None:
    async with ollama.AsyncClient(server.url) as client:
        stream = await client.chat(MODEL, SUM, stream=True, options=GREEDY)
        texts = [part.message.content or "" async for part in stream]
        image = ollama.Image(value=red_disc())
        seen = await client.generate(SEES, "What colour is it?", images=[image], options=GREEDY)
    assert "".join(texts) == "17 + 25 = 42"
    assert seen.response == "red"


def test_an_empty_format_is_none(server: ServerProcess) -> None:
    """Some programs send it with every request."""
    answer = post(server, "chat", messages=SUM, options=GREEDY, format="")
    assert answer["message"]["content"] == "17 + 25 = 42"


@pytest.mark.parametrize("form", ["json", CITY], ids=["json", "schema"])
def test_the_text_matches_its_format(client: ollama.Client, form: Any) -> None:
    options = {"temperature": 1, "seed": 3, "num_predict": 200}
    answer = client.chat(MODEL, PARIS, format=form, options=options, think=False)
    if answer.done_reason == "stop":
        jsonschema.validate(
            json.loads(answer.message.content or ""), {} if form == "json" else form
        )


def test_raw_prompts_have_no_template(client: ollama.Client, server: ServerProcess) -> None:
    template = f"<|im_start|>user\n{SUM[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    options = GREEDY | {"num_predict": 20}
    answer = client.generate(MODEL, template, raw=True, options=options)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        same = api.completions.create(model=MODEL, prompt=template, max_tokens=20, temperature=0)
    assert answer.response == same.choices[0].text
    assert same.usage is not None
    assert answer.prompt_eval_count == same.usage.prompt_tokens
    assert answer.done_reason == "length"
    # A system prompt comes before the prompt, as a message.
    briefed = client.generate(MODEL, "Who?", system="You are Bo.", options=options)
    whole = client.chat(
        MODEL,
        [{"role": "system", "content": "You are Bo."}, {"role": "user", "content": "Who?"}],
        options=options,
    )
    assert (briefed.response, briefed.thinking) == (whole.message.content, whole.message.thinking)


def test_an_open_message_of_the_assistant_is_continued(client: ollama.Client) -> None:
    begun = [*SUM, {"role": "assistant", "content": "17 + 25 ="}]
    assert (chat(client, begun).message.content or "").strip() == "42"
    empty = [*SUM, {"role": "assistant", "content": ""}]
    assert chat(client, empty).message.content == "17 + 25 = 42"


def test_logprobs_are_of_the_tokens(client: ollama.Client) -> None:
    answer = client.chat(MODEL, SUM, think=False, logprobs=True, top_logprobs=2, options=GREEDY)
    assert answer.logprobs is not None
    assert "".join(each.token for each in answer.logprobs).startswith("17 + 25 = 42")
    assert {len(each.top_logprobs or ()) for each in answer.logprobs} == {2}


def test_vectors(client: ollama.Client, server: ServerProcess) -> None:
    texts = ["A cat sleeps.", "A dog barks."]
    answer = client.embed(EMBEDS, texts)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        expected = [
            each.embedding for each in api.embeddings.create(model=EMBEDS, input=texts).data
        ]
    np.testing.assert_allclose(answer.embeddings, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.linalg.norm(answer.embeddings, axis=1), 1, rtol=1e-5)
    assert answer.prompt_eval_count
    (alone,) = client.embed(f"{EMBEDS}:latest", texts[0]).embeddings
    np.testing.assert_allclose(alone, answer.embeddings[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(client.embeddings(EMBEDS, texts[0]).embedding, alone, rtol=1e-4)
    assert client.embed(EMBEDS, "").embeddings == []
    assert client.embeddings(EMBEDS, "").embedding == []
    # The context has 128 tokens.
    assert len(client.embed(EMBEDS, "cat " * 500).embeddings) == 1
    with pytest.raises(ollama.ResponseError, match="input"):
        client.embed(EMBEDS, "cat " * 500, truncate=False)


def test_models_are_listed_and_described(client: ollama.Client) -> None:
    listed = {model.model: model for model in client.list().models}
    assert list(listed) == [f"{MODEL}:latest", SEES, EMBEDS]
    assert all(model.size and model.modified_at and model.digest for model in listed.values())
    running = {model.model: model for model in client.ps().models}
    assert list(running) == list(listed)
    assert running[SEES].context_length == 2048
    shown = client.show(f"{MODEL}:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.template
    assert shown.modelinfo is not None
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] == 8192
    assert "vision" in (client.show(SEES).capabilities or ())
    assert client.show(EMBEDS).capabilities == ["embedding"]


def test_the_list_says_what_models_can_do(server: ServerProcess) -> None:
    models = httpx2.get(f"{server.url}/api/tags").json()["models"]
    assert [model["capabilities"][0] for model in models] == [
        "completion",
        "completion",
        "embedding",
    ]
    version = httpx2.get(f"{server.url}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


def test_without_a_prompt_the_model_is_loaded(client: ollama.Client) -> None:
    assert client.generate(f"{MODEL}:latest").done_reason == "load"
    assert client.chat(MODEL, [], keep_alive="5m").done_reason == "load"


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("chat", {"model": "nope"}, 404, "nope"),
    ("chat", {"model": EMBEDS, "messages": SUM}, 400, EMBEDS),
    ("chat", {"messages": [{"role": "user", "images": ["http://x/y.png"]}]}, 400, "images[0]"),
    ("chat", {"messages": [{"role": "boss", "content": "x"}]}, 400, "messages.0.role"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, 400, "content[0].type"),
    ("chat", {"messages": SUM, "format": "xml"}, 400, "format"),
    ("chat", {"messages": SUM, "format": 3}, 400, "format"),
    ("chat", {"messages": SUM, "tools": [{"function": {}}]}, 400, "tools[0].function.name"),
    ("chat", {"messages": SUM, "keep_alive": "5x"}, 400, "keep_alive"),
    ("chat", {"messages": SUM, "options": {"temperature": "hot"}}, 400, "options.temperature"),
    ("chat", {"messages": SUM, "options": {"stop": ["x"] * 65}}, 400, "options.stop"),
    ("chat", {"messages": SUM, "options": {"num_predict": 9000}}, 400, "options.num_predict"),
    ("chat", {"messages": SUM, "logprobs": True, "top_logprobs": 99}, 400, "top_logprobs"),
    ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template"),
    ("generate", {"prompt": "x", "context": [1, 2]}, 400, "context"),
    ("generate", {"prompt": "x", "suffix": "y"}, 400, "fill-in-the-middle"),
    ("generate", {"prompt": "x", "suffix": "y", "system": "z"}, 400, "suffix"),
    ("generate", {"prompt": "x", "images": ["?"]}, 400, "images"),
    ("embed", {"model": MODEL, "input": "x"}, 400, MODEL),
    ("embed", {}, 400, "input"),
    ("embed", {"input": "x", "dimensions": 99999}, 400, "dimensions"),
    ("show", {"model": "nope"}, 404, "nope"),
    ("pull", {"model": "nope"}, 404, "POST /v1/models/load"),
    ("create", {"model": "nope", "from": MODEL}, 404, "POST /v1/models/load"),
    ("copy", {"source": MODEL, "destination": "x"}, 404, "POST /v1/models/load"),
    ("push", {"model": "nope"}, 404, "POST /v1/models/load"),
    ("blobs/sha256:0", {}, 404, "POST /v1/models/load"),
]


@pytest.mark.parametrize(("path", "body", "status", "text"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(
    server: ServerProcess, path: str, body: dict[str, Any], status: int, text: str, stream: bool
) -> None:
    answer = httpx2.post(f"{server.url}/api/{path}", json=body | {"stream": stream})
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    assert text in answer.json()["error"]


def test_the_client_raises_refusals(client: ollama.Client) -> None:
    for call in (client.pull, client.delete, client.show):
        with pytest.raises(ollama.ResponseError) as refusal:
            call("nope")
        assert refusal.value.status_code == 404


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    answer = httpx2.post(f"{server.url}/api/{path}", json=body | {"stream": False})
    assert answer.status_code == 200, answer.text
    return answer.json()
