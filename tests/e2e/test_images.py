"""Images in chats, by OpenAI's client."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from PIL import Image

from scripts.golden_vision_parts import golden_image
from tests.image_folders import TEXTS, write_llava, write_qwen
from tests.message_events import input_tokens_of
from tests.pdf_files import pdf_of
from tests.server_process import ServerProcess
from tests.unit.media.images import file_of, gif_of_frames, noise, png_of_size

NUM_TOKENS = 16
MODEL, TEXT_TEMPLATE, QWEN = "see", "see-texts", "see-qwen"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("images")
    first = str(write_llava(folder / "first"))
    second = str(write_llava(folder / "second", template=TEXTS))
    third = str(write_qwen(folder / "third"))
    process = ServerProcess(
        *("--model", first, second, third),
        *("--served-model-name", f"{first}={MODEL}", f"{second}={TEXT_TEMPLATE}"),
        f"{third}={QWEN}",
        *("--max-images-per-request", "3", "--max-image-pixels", "30000"),
    )
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        yield api


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def url_of(seed: int, size: tuple[int, int] = (40, 50), kind: str = "PNG") -> str:
    data = io.BytesIO()
    Image.fromarray(golden_image(seed, *size)).save(data, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"


def image(seed: int, size: tuple[int, int] = (40, 50), **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(seed, size), **more}}


def ask(client: openai.OpenAI, *parts: dict[str, Any], model: str = MODEL, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": list(parts)}]
    return client.chat.completions.create(
        model=model, messages=messages, max_tokens=12, temperature=0, **more
    )


def answer(client: openai.OpenAI, *parts: dict[str, Any], **more: Any) -> str:
    return ask(client, *parts, **more).choices[0].message.content


def test_answers_depend_on_images_and_on_their_places(client: openai.OpenAI) -> None:
    answers = {
        answer(client, text("w20"), image(1), text("w21")),
        answer(client, text("w20"), image(2), text("w21")),
        answer(client, image(1), text("w20 w21")),
        answer(client, image(1), image(2), text("w20 w21")),
        answer(client, image(2), image(1), text("w20 w21")),
    }
    assert len(answers) == 5


def test_images_of_any_size_have_tokens_of_their_own(client: openai.OpenAI) -> None:
    small, large = image(1, size=(56, 84)), image(1, size=(140, 196))
    counts = [
        ask(client, text("w30"), each, text("w31"), model=QWEN).usage.prompt_tokens
        for each in (small, large)
    ]
    assert counts[1] - counts[0] == 5 * 7 - 2 * 3
    answers = {answer(client, *parts, model=QWEN) for parts in ([small], [large], [small, large])}
    assert len(answers) == 3


def test_the_forms_of_a_part_are_equal(client: openai.OpenAI) -> None:
    expected = answer(client, image(1), text("w20"))
    bare = {"type": "image_url", "image_url": url_of(1)}
    assert answer(client, bare, text("w20")) == expected
    assert answer(client, image(1, detail="high"), text("w20")) == expected
    # The template of the second model reads no parts.
    assert ask(client, image(1), text("w20"), model=TEXT_TEMPLATE).usage.prompt_tokens


def test_tokens_are_counted_and_prefixes_are_reused(client: openai.OpenAI) -> None:
    words = text(" ".join(["w30"] * 40))
    first = ask(client, words, image(3), text("w32"))
    # user: the words, the image, w32 assistant:
    assert first.usage.prompt_tokens == 1 + 40 + NUM_TOKENS + 2
    again = ask(client, words, image(3), text("w32"))
    assert again.usage.prompt_tokens_details.cached_tokens == 48
    assert again.choices[0].message.content == first.choices[0].message.content
    other = ask(client, words, image(4), text("w32"))
    assert other.usage.prompt_tokens_details.cached_tokens == 32
    assert other.usage.prompt_tokens_details.image_tokens == NUM_TOKENS
    assert ask(client, words).usage.prompt_tokens_details.image_tokens is None


def metric(server: ServerProcess, name: str, model: str) -> float:
    lines = httpx2.get(f"{server.url}/metrics").text.splitlines()
    start = f"vllm:{name}{{"
    values = [line for line in lines if line.startswith(start) and model in line]
    return sum(float(line.rpartition(" ")[2]) for line in values)


# Each engine keeps features of its own, and a prompt that begins otherwise may go to another one.
@pytest.mark.one_engine
def test_metrics_count_towers_and_features(server: ServerProcess, client: openai.OpenAI) -> None:
    def counts() -> tuple[float, float]:
        names = ("image_tower_runs_total", "image_feature_hits_total")
        return metric(server, names[0], QWEN), metric(server, names[1], QWEN)

    runs, hits = counts()
    ask(client, image(71), text("w20"), model=QWEN)
    assert counts() == (runs + 1, hits)
    # The words before the image differ, so the features are found and the blocks are not.
    ask(client, text("w41 w42"), image(71), text("w20"), model=QWEN)
    assert counts() == (runs + 1, hits + 1)
    assert metric(server, "image_feature_bytes", QWEN) > 0


def test_marks_that_are_typed_stay_text(client: openai.OpenAI) -> None:
    plain = ask(client, image(1), text("w20"))
    typed = ask(client, image(1), text("w20 <image>"))
    assert typed.usage.prompt_tokens < plain.usage.prompt_tokens + NUM_TOKENS


def test_streams_are_equal(client: openai.OpenAI) -> None:
    expected = answer(client, image(1), text("w20"))
    chunks = ask(client, image(1), text("w20"), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_a_low_detail_makes_a_large_image_small(client: openai.OpenAI) -> None:
    """Check an image within 512 pixels, which is seen as it is."""
    assert answer(client, image(1, detail="low")) == answer(client, image(1))


WIDE = {"type": "image_url", "image_url": {"url": url_of(1, (301, 100))}}


@pytest.mark.parametrize(
    ("part", "param", "why"),
    [
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}, "", "not fetched"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "", "not read"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "", "PNG"),
        ({"type": "image_url", "image_url": {"url": url_of(1)[:402]}}, "", "truncated"),
        ({"type": "image_url", "image_url": {}}, "", "url"),
        ({"type": "image_url"}, "", "url"),
        (image(1, detail="most"), ".detail", "auto, low, high"),
        (WIDE, "", "301"),
    ],
)
def test_bad_images_are_refused_by_their_part(
    client: openai.OpenAI, part: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        ask(client, text("w20"), part)
    assert caught.value.param == f"messages[0].content[1].image_url{param}"
    assert answer(client, text("w20"))


def test_bodies_may_be_larger_where_images_are_taken(client: openai.OpenAI) -> None:
    data = base64.b64encode(bytes(8 * 2**20)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    with pytest.raises(openai.BadRequestError, match="not an image"):
        ask(client, part)


def test_too_many_images_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="4 images; at most 3"):
        ask(client, *[image(seed) for seed in range(4)])


def test_more_than_the_context_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    words = " ".join(["w40"] * 500)
    with pytest.raises(openai.BadRequestError, match=r"512 tokens.*518 tokens"):
        ask(client, text(words), image(1))


def test_responses_take_images_and_go_on_with_them(client: openai.OpenAI) -> None:
    expected = answer(client, text("w20"), image(1), text("w21"))
    part: Any = {"type": "input_image", "image_url": url_of(1), "detail": "auto"}
    texts: list[Any] = [{"type": "input_text", "text": word} for word in ("w20", "w21")]
    content: Any = [{"role": "user", "content": [texts[0], part, texts[1]]}]
    options: Any = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(input=content, **options)
    assert first.output_text == expected
    assert first.usage is not None
    details: Any = first.usage.input_tokens_details
    assert details.image_tokens == NUM_TOKENS
    counted = client.responses.input_tokens.count(input=content, model=MODEL)
    assert counted.input_tokens == first.usage.input_tokens
    more = client.responses.create(input="w22", previous_response_id=first.id, **options)
    assert more.usage is not None
    assert more.usage.input_tokens > first.usage.input_tokens
    wrong: Any = [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]
    with pytest.raises(openai.BadRequestError, match="file_id"):
        client.responses.create(input=wrong, **options)
    call = {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "t1"}
    user = {"role": "user", "content": "w20"}
    looked: Any = [user, call, result | {"output": content[0]["content"]}]
    shown = client.responses.create(input=looked, **options)
    assert shown.output_text == looked_in_chat(client)
    looked[2]["output"] = [texts[0], {"type": "input_image", "image_url": "data:image/png,x"}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input=looked, **options)
    assert caught.value.param == "input[2].output[1].image_url"


def looked_in_chat(client: openai.OpenAI) -> str:
    """Return the answer to a tool's result that has an image."""
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": "w20"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": [text("w20"), image(1), text("w21")]},
    ]
    answered = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=12, temperature=0
    )
    assert answered.usage is not None
    details: Any = answered.usage.prompt_tokens_details
    assert details.image_tokens == NUM_TOKENS
    return answered.choices[0].message.content or ""


def test_messages_take_images(server: ServerProcess, client: openai.OpenAI) -> None:
    expected = answer(client, text("w20"), image(1), text("w21"))
    data = url_of(1).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks: list[Any] = [text("w20"), {"type": "image", "source": source}, text("w21")]
    body: Any = {"model": MODEL, "messages": [{"role": "user", "content": blocks}]}
    greedy: Any = {"max_tokens": 12, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=server.url, api_key="none") as api:
        message: Any = api.messages.create(**greedy, **body)
        assert [block.text for block in message.content if block.type == "text"] == [expected]
        counted = api.messages.count_tokens(**body)
        assert counted.input_tokens == input_tokens_of(message.usage)
        result = {"type": "tool_result", "tool_use_id": "t1", "content": blocks}
        call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
        looked: list[Any] = [
            {"role": "user", "content": "w20"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        shown: Any = api.messages.create(**greedy, model=MODEL, messages=looked)
        expected = looked_in_chat(client)
        assert [block.text for block in shown.content if block.type == "text"] == [expected]
        wrong: Any = {"type": "image", "source": source | {"data": "AAAA"}}
        result["content"] = [wrong]
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.2\.content\.0\.content\.0"):
            api.messages.create(**greedy, model=MODEL, messages=looked)
        source["media_type"] = "image/webp"
        with pytest.raises(anthropic.BadRequestError, match="image/png"):
            api.messages.create(**greedy, **body)


def test_pages_of_a_pdf_file_are_images(server: ServerProcess) -> None:
    def count(num_pages: int, **greedy: Any) -> int:
        data = base64.b64encode(pdf_of(*["w20"] * num_pages)).decode()
        source = {"type": "base64", "media_type": "application/pdf", "data": data}
        blocks: list[Any] = [{"type": "document", "source": source}, text("w21")]
        body: Any = {"model": MODEL, "messages": [{"role": "user", "content": blocks}]}
        counted = api.messages.count_tokens(**body).input_tokens
        if greedy:
            assert input_tokens_of(api.messages.create(**greedy, **body).usage) == counted
        return counted

    with anthropic.Anthropic(base_url=server.url, api_key="none") as api:
        assert count(2, max_tokens=3) - count(1) == NUM_TOKENS
        with pytest.raises(
            anthropic.BadRequestError, match=r"0\.source: The PDF file has 17 pages"
        ):
            count(17)


def test_prompts_of_sglang_take_images(server: ServerProcess, client: openai.OpenAI) -> None:
    expected = answer(client, text("w20"), image(1), text("w21"))
    body: dict[str, Any] = {
        "model": MODEL,
        "sampling_params": {"temperature": 0, "max_new_tokens": 12},
        "text": "user: w20 <image> w21 assistant:",
    }

    def generate(**more: Any) -> httpx2.Response:
        return httpx2.post(f"{server.url}/generate", json=body | more)

    data = url_of(1).partition(",")[2]
    for shown in (url_of(1), data, [data]):
        answered = generate(image_data=shown).json()
        assert answered["text"].strip() == expected.strip()
        # user: w20, the image, w21 assistant:
        assert answered["meta_info"]["prompt_tokens"] == 4 + NUM_TOKENS
    # The ids of the same words.
    by_ids = generate(text=None, input_ids=[4, 20, 3, 21, 5], image_data=data).json()
    assert by_ids["text"].strip() == expected.strip()
    several = generate(text=[body["text"], "user: w20"], image_data=[[data], None]).json()
    assert several[0]["text"].strip() == expected.strip()
    refused = generate(image_data=[data, data]).json()["error"]
    assert "1 placeholders <image> for 2 images" in refused["message"]
    assert generate(image_data=[data, "AAAA"]).json()["error"]["param"] == "image_data[1]"


def test_tokens_of_images_are_counted(server: ServerProcess, client: openai.OpenAI) -> None:
    for model in (MODEL, TEXT_TEMPLATE, QWEN):
        parts = [text("w20"), image(1), text("w21")]
        body = {"model": model, "messages": [{"role": "user", "content": parts}]}
        counted = httpx2.post(f"{server.url}/tokenize", json=body).json()
        usage = ask(client, *parts, model=model).usage
        assert counted["count"] == len(counted["tokens"]) == usage.prompt_tokens


def test_routes_without_images_say_so(client: openai.OpenAI, server: ServerProcess) -> None:
    messages = [{"role": "user", "content": [image(1)]}]
    body = {"model": MODEL, "messages": messages}
    refused = httpx2.post(f"{server.url}/apply-template", json=body)
    assert refused.status_code == 400
    assert "text" in refused.json()["error"]["message"]


def bad_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def bomb() -> bytes:
    """Return a PNG file of a kilobyte that says it has 60,000 x 60,000 pixels."""
    return png_of_size(60_000, 60_000)


BAD_URLS = [
    pytest.param(bad_url(file_of(noise(), "png")[:60]), "truncated", id="truncated"),
    pytest.param(bad_url(png_of_size(201, 1)), "200 times", id="line"),
    pytest.param(bad_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "", id="svg"),
    pytest.param(bad_url(b"<html><body>private</body></html>"), "HTML", id="html"),
    pytest.param(bad_url(bomb()), "60000 x 60000", id="bomb"),
    pytest.param(bad_url(png_of_size(4, 4, depth=16)), "16", id="16-bit"),
    pytest.param("data:image/png;base64,iVBO*w0K", "base64", id="base64"),
    pytest.param(bad_url(bytes(4) + b"ftypavif" + bytes(40), "avif"), "AVIF", id="avif"),
    pytest.param(bad_url(bytes(4) + b"ftypheic" + bytes(40), "heic"), "HEIC", id="heic"),
    pytest.param("file:///etc/passwd", "not read", id="file"),
    pytest.param("ftp://example.org/x", "must begin with", id="ftp"),
    pytest.param("http://0177.0.0.1/x", "not valid", id="octal"),
    *[
        pytest.param(url, "not fetched", id=url)
        for url in (
            "http://127.0.0.1/x",
            "http://10.0.0.1/x",
            "http://169.254.169.254/latest",
            "http://[::ffff:127.0.0.1]/x",
            "http://2130706433/x",
        )
    ],
]


@pytest.mark.parametrize(("url", "why"), BAD_URLS)
def test_bad_input_names_its_part(client: openai.OpenAI, url: str, why: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, text("w20"), part)
    assert caught.value.param == "messages[0].content[1].image_url"
    assert why in caught.value.message
    assert "private" not in caught.value.message


def test_a_gif_of_many_frames_shows_its_first(client: openai.OpenAI) -> None:
    first, many = (bad_url(gif_of_frames(count), "gif") for count in (1, 1_000))
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in (first, many)]
    assert answer(client, shown[0], text("w20")) == answer(client, shown[1], text("w20"))


def test_ten_thousand_parts_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="10000 images; at most 3"):
        ask(client, *[{"type": "image_url", "image_url": "http://127.0.0.1/x"}] * 10_000)


@pytest.fixture(scope="module")
def fetching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yield a server that fetches from any public host, and keeps files."""
    folder = tmp_path_factory.mktemp("fetching")
    process = ServerProcess(
        *("--model", str(write_llava(folder / "model")), "--allowed-media-domains", "*"),
        *("--data-dir", str(folder / "data"), "--max-images-per-request", "1"),
    )
    process.wait_until_ready()
    yield process
    process.stop()


PRIVATE = [
    "http://127.0.0.1:1/x",
    "http://10.0.0.1/x",
    "http://169.254.169.254/latest",
    "http://[::ffff:127.0.0.1]/x",
    "http://[::1]/x",
    "http://2130706433/x",
    "http://0x7f.1/x",
    "ftp://example.org/x",
    "file:///etc/passwd",
    "http://user:secret@example.org/x",
]


@pytest.mark.parametrize("url", PRIVATE)
def test_hosts_that_are_not_public_are_not_asked(fetching: ServerProcess, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    with openai.OpenAI(base_url=f"{fetching.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, part, model=model)
    assert caught.value.param == "messages[0].content[0].image_url"
    assert "reached" not in caught.value.message
    assert "secret" not in caught.value.message


def test_batches_take_images_within_the_limits(fetching: ServerProcess) -> None:
    def line(name: str, count: int) -> str:
        message = {"role": "user", "content": [image(1)] * count}
        body = {"messages": [message], "max_tokens": 2}
        call = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions"}
        return json.dumps(call | {"body": body})

    with openai.OpenAI(base_url=f"{fetching.url}/v1", api_key="none") as client:
        lines = f"{line('one', 1)}\n{line('two', 2)}\n".encode()
        file = client.files.create(file=("lines.jsonl", lines), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while batch.status not in ("completed", "failed"):
            batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        answered = json.loads(client.files.content(batch.output_file_id).text)
        details = answered["response"]["body"]["usage"]["prompt_tokens_details"]
        assert (answered["custom_id"], details["image_tokens"]) == ("one", NUM_TOKENS)
        assert "2 images; at most 1" in client.files.content(batch.error_file_id).text
