"""Bad images are refused on every route, by the part of the request that has them."""

from __future__ import annotations

import base64
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from PIL import Image

from tests.image_folders import write_llava
from tests.server_process import ServerProcess
from tests.unit.media.images import file_of, noise, png_of_size

MEMORY = Path("/proc/self/clear_refs")
# MOST_KIB: that bad images may take.
MOST_KIB = 50 * 1024
SEES, TEXT = "see", "mlx-parallm-demo"
MOST = 3


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def long_gif() -> bytes:
    """Return a GIF of 10,000 equal frames."""
    short = file_of(Image.new("P", (2, 2)), "gif")
    start = short.index(b"\x2c")
    return short[:start] + short[start:-1] * 10_000 + short[-1:]


GOOD = data_url(file_of(noise(size=(40, 50))))
BAD: dict[str, tuple[str, str]] = {
    "truncated": (data_url(file_of(noise())[:60]), "PNG file is truncated or damaged"),
    "line": (data_url(png_of_size(6000, 1)), "at most 200 times as long"),
    "row": (data_url(png_of_size(40_000_000, 1)), "along a side"),
    "svg": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "This is SVG"),
    "html": (data_url(b"<html>private</html>"), "This is HTML"),
    "bomb": (data_url(png_of_size(60_000, 60_000)), "60000 x 60000 pixels; at most 40000000"),
    "frames": (data_url(long_gif(), "gif"), "more than 1000 frames"),
    "base64": ("data:image/png;base64,iVBO*w0K", "not valid base64"),
    "avif": (data_url(bytes(4) + b"ftypavif" + bytes(40), "avif"), "This is AVIF"),
    "heic": (data_url(bytes(4) + b"ftypheic" + bytes(40), "heic"), "This is HEIC"),
    "jpeg 2000": (data_url(b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(30), "jp2"), "This is JPEG 2000"),
    "16 bits": (data_url(png_of_size(4, 4, depth=16)), "16 bits per channel"),
    "file": ("file:///etc/passwd", "not read"),
    "ftp": ("ftp://example.org/x", "must begin with"),
    "loopback": ("http://127.0.0.1/private", "not fetched"),
    "mapped": ("http://[::ffff:127.0.0.1]/private", "not fetched"),
    "credentials": ("http://user:private@example.org/x", "a user or a password"),
}


def wrapped(url: str) -> str:
    """Return a URL whose base64 is in lines and has no padding."""
    head, _, text = url.partition(",")
    return f"{head},{chr(10).join(textwrap.wrap(text.rstrip('='), 76))}\n"


#: Images that are labelled or written wrongly; Anthropic's own API refuses them.
CARELESS = {
    "label": data_url(file_of(noise(size=(40, 51)), "jpeg")),
    "wrapped": wrapped(data_url(file_of(noise(size=(40, 52))))),
}
#: Files that lack their end, which hold a whole image.
ENDLESS = {
    "png": data_url(file_of(noise(size=(40, 53)))[:-12]),
    "gif": data_url(file_of(noise(size=(40, 54)), "gif")[:-1], "gif"),
}


def chat_part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def messages(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "w20"}, *parts]}]


def chat(*urls: str) -> dict[str, Any]:
    return {"messages": messages(*map(chat_part, urls)), "max_tokens": 2}


def responses(*urls: str) -> dict[str, Any]:
    parts = [{"type": "input_image", "image_url": url} for url in urls]
    content = [{"type": "input_text", "text": "w20"}, *parts]
    return {"input": [{"role": "user", "content": content}], "max_output_tokens": 2}


def anthropic(*urls: str) -> dict[str, Any]:
    sources = []
    for url in urls:
        head, _, data = url.partition(",")
        kind = head.removeprefix("data:").partition(";")[0]
        base64_source = {"type": "base64", "media_type": kind, "data": data}
        sources.append(base64_source if data else {"type": "url", "url": url})
    return {
        "messages": messages(*({"type": "image", "source": source} for source in sources)),
        "max_tokens": 2,
    }


def generate(*urls: str) -> dict[str, Any]:
    text = "w20 " + "<image> " * len(urls)
    return {"text": text, "image_data": list(urls), "sampling_params": {"max_new_tokens": 2}}


def token_generate(*urls: str) -> dict[str, Any]:
    return {
        "token_ids": [4, *[3] * len(urls)],
        "content_parts": list(map(chat_part, urls)),
        "sampling_params": {"max_tokens": 2},
    }


def rollout(*urls: str) -> dict[str, Any]:
    return {"prompts": [{"messages": messages(*map(chat_part, urls))}], "max_tokens": 2}


def written_rollout(*urls: str) -> dict[str, Any]:
    text = "w20 " + "<image> " * len(urls)
    return {"prompts": [{"text": text, "images": list(urls)}], "max_tokens": 2}


def scores(*urls: str) -> dict[str, Any]:
    item = {"prompt_token_ids": [4, *[3] * len(urls)], "images": list(urls)}
    return {"items": [{**item, "completion_token_ids": [20]}]}


#: Routes, their bodies for some images, and the name of the image of a given number.
ROUTES: dict[str, tuple[str, Callable[..., dict[str, Any]], str]] = {
    "chat": ("/v1/chat/completions", chat, "messages[0].content[{part}].image_url"),
    "responses": ("/v1/responses", responses, "input[0].content[{part}].image_url"),
    "messages": ("/v1/messages", anthropic, "messages.0.content.{part}.source"),
    "count": ("/v1/messages/count_tokens", anthropic, "messages.0.content.{part}.source"),
    "generate": ("/generate", generate, "image_data[{number}]"),
    "tokens": ("/inference/v1/generate", token_generate, "content_parts[{number}]"),
    "rollout": ("/v1/rl/rollout", rollout, "prompts[0].messages[0].content[{part}].image_url"),
    "written": ("/v1/rl/rollout", written_rollout, "prompts[0].images[{number}]"),
    "scores": ("/v1/rl/logprobs", scores, "items[0].images[{number}]"),
    "tokenize": ("/tokenize", chat, "messages[0].content[{part}].image_url"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("bad")
    model = str(write_llava(folder / "model"))
    process = ServerProcess(
        *("--model", model, TEXT, "--served-model-name", f"{model}={SEES}"),
        *("--max-images-per-request", f"{MOST}", "--data-dir", str(folder / "data")),
    )
    process.wait_until_ready()
    yield process
    process.stop()


def posted(
    server: ServerProcess, route: str, *urls: str, model: str = SEES, **more: Any
) -> httpx2.Response:
    path, body, _ = ROUTES[route]
    return httpx2.post(f"{server.url}{path}", json={"model": model, **body(*urls), **more})


def assert_refused(response: httpx2.Response, route: str, why: str, number: int = 0) -> None:
    """Check for a 400 that names an image by its part."""
    assert response.status_code == 400
    error = response.json()["error"]
    name = ROUTES[route][2].format(number=number, part=number + 1)
    # Anthropic's errors have no field for it.
    assert (error.get("param") or error["message"].partition(": ")[0]) == name
    assert why in error["message"]
    assert "private" not in response.text


@pytest.mark.parametrize("route", ROUTES)
def test_bad_images_name_their_part(server: ServerProcess, route: str) -> None:
    for url, why in BAD.values():
        assert_refused(posted(server, route, GOOD, url), route, why, number=1)
    assert posted(server, route, GOOD).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_bytes_decide_what_a_image_is(server: ServerProcess, route: str) -> None:
    for url in ENDLESS.values():
        assert posted(server, route, url).status_code == 200
    for url in CARELESS.values():
        expected = 400 if ROUTES[route][1] is anthropic else 200
        assert posted(server, route, url).status_code == expected


@pytest.mark.skipif(not MEMORY.exists(), reason="only Linux tells a process's largest memory")
def test_bad_images_take_little_memory(server: ServerProcess) -> None:
    for route in ("chat", "messages"):
        posted(server, route, GOOD)
        folder = MEMORY.parents[1] / str(server.process.pid)
        before = memory_of(folder, "VmRSS")
        # The largest memory is counted from now on.
        (folder / MEMORY.name).write_text("5")
        for url, _ in BAD.values():
            assert posted(server, route, url).status_code == 400
        assert posted(server, route, *[GOOD] * 1000).status_code == 400
        assert memory_of(folder, "VmHWM") - before <= MOST_KIB


@pytest.mark.skipif(not MEMORY.exists(), reason="only Linux tells a process's memory")
def test_pixels_of_large_images_are_given_back(server: ServerProcess) -> None:
    folder = MEMORY.parents[1] / str(server.process.pid)

    def see(number: int) -> int:
        image = Image.new("RGB", (2000, 1500), (number, 9, 9))
        assert posted(server, "chat", data_url(file_of(image, "jpeg"), "jpeg")).status_code == 200
        return memory_of(folder, "VmRSS")

    before = [see(number) for number in range(3)][-1]
    # The pixels of all these have 90 MB.
    after = [see(number) for number in range(3, 13)][-1]
    assert after - before <= MOST_KIB


def memory_of(folder: Path, name: str) -> int:
    """Return a figure of a process's memory, in KiB."""
    (line,) = re.findall(rf"^{name}:\s+(\d+) kB$", (folder / "status").read_text(), re.MULTILINE)
    return int(line)


@pytest.mark.parametrize("route", ROUTES)
def test_text_models_take_no_images(server: ServerProcess, route: str) -> None:
    assert_refused(posted(server, route, GOOD, model=TEXT), route, "take")


@pytest.mark.parametrize("route", ROUTES)
def test_ten_thousand_images_are_refused(server: ServerProcess, route: str) -> None:
    response = posted(server, route, *["http://127.0.0.1/private"] * 10_000)
    assert response.status_code == 400
    assert "1" in response.text
    assert "private" not in response.text


def test_a_wrong_detail_is_named(server: ServerProcess) -> None:
    for route, name in (("chat", "messages"), ("rollout", "prompts[0].messages")):
        path, body, _ = ROUTES[route]
        content: Any = body(GOOD)
        parts: Any = content["prompts"][0] if route == "rollout" else content
        parts["messages"][0]["content"][1]["image_url"]["detail"] = "most"
        error = httpx2.post(f"{server.url}{path}", json={"model": SEES, **content}).json()["error"]
        assert error["param"] == f"{name}[0].content[1].image_url.detail"
    body = responses(GOOD)
    body["input"][0]["content"][1]["detail"] = "most"
    error = httpx2.post(f"{server.url}/v1/responses", json={"model": SEES, **body}).json()["error"]
    assert error["param"] == "input[0].content[1].detail"


def test_bad_lines_of_a_batch_are_refused_alone(server: ServerProcess) -> None:
    def line(name: str, url: str, model: str = SEES) -> str:
        body = {"model": model, **chat(url)}
        call = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        return json.dumps(call)

    lines = [line(name, url) for name, (url, _) in BAD.items()] + [line("good", GOOD)]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        content = "\n".join(lines).encode()
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while batch.status not in ("completed", "failed"):
            batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        (good,) = client.files.content(batch.output_file_id).text.splitlines()
        errors = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
        answers = {error["custom_id"]: error["response"] for error in errors}
    assert json.loads(good)["custom_id"] == "good"
    assert answers.keys() == BAD.keys()
    for name, answer in answers.items():
        assert answer["status_code"] == 400
        error = answer["body"]["error"]
        assert error["param"] == "messages[0].content[1].image_url"
        assert BAD[name][1] in error["message"]


def test_more_images_than_fit_name_both_numbers(server: ServerProcess) -> None:
    # The context has 512 tokens.
    words = " ".join(["w30"] * 490)
    for route in ("chat", "responses", "messages", "generate", "rollout"):
        path, body, _ = ROUTES[route]
        content = json.dumps(body(GOOD, GOOD)).replace("w20", words)
        response = httpx2.post(f"{server.url}{path}", json={"model": SEES, **json.loads(content)})
        assert response.status_code == 400
        numbers = [int(number) for number in re.findall(r"(\d+) (?:tokens|maximum)", response.text)]
        # Anthropic's words say how long a prompt may be: one token is for the answer.
        assert min(numbers) in (511, 512)
        assert max(numbers) > 512, response.text


def test_logs_have_no_credentials(server: ServerProcess) -> None:
    posted(server, "chat", "http://user:private@example.org/x?token=private")
    assert "private" not in server.log


LARGE = data_url(file_of(noise(size=(800, 600))))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"messages": chat(LARGE)["messages"]}),
        ("/v1/chat/completions/input_tokens", {"messages": chat(LARGE)["messages"]}),
        ("/v1/messages/count_tokens", {"messages": anthropic(LARGE)["messages"]}),
        ("/v1/responses/input_tokens", {"input": responses(LARGE)["input"]}),
    ],
)
def test_tokens_of_large_images_are_counted_and_of_long_texts_not(
    server: ServerProcess, path: str, body: dict[str, Any]
) -> None:
    assert len(LARGE) > 2**20
    whole = json.dumps({"model": SEES, **body})

    def posted_text(content: str) -> httpx2.Response:
        headers = {"content-type": "application/json"}
        return httpx2.post(f"{server.url}{path}", content=content, headers=headers)

    for content in (whole, whole.replace("/", "\\/")):
        response = posted_text(content)
        assert response.status_code == 200, response.text
    response = posted_text(whole.replace("w20", "w20 " * 300_000))
    assert response.status_code == 413
    assert "without its images is larger than 1048576 bytes" in response.text
