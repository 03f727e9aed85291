"""Images in rollouts, in scores of known tokens and on vLLM's and SGLang's token routes."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from PIL import Image

from mlx_parallm.client import RequestFailedError, RLClient, Rollout
from mlx_parallm.media.image_file import image_url
from scripts.golden_vision_parts import SPECIALS, golden_image
from tests.image_folders import write_llava, write_qwen
from tests.server_process import ServerProcess

NUM_TOKENS = 16
MODEL, QWEN = "see", "see-qwen"
# IMAGE, USER, ASSISTANT: tokens of both tiny models' words.
IMAGE, USER, ASSISTANT = 3, 4, 5
# IMAGE_PAD: the placeholder of the tiny Qwen2.5-VL.
IMAGE_PAD = SPECIALS.index("<|image_pad|>")
# TOLERANCE: between log-probabilities of decode and of prefill, in float32.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("rollouts")
    first, second = str(write_llava(folder / "first")), str(write_qwen(folder / "second"))
    process = ServerProcess(
        *("--model", first, second, "--served-model-name", f"{first}={MODEL}", f"{second}={QWEN}")
    )
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[RLClient]:
    async with RLClient(server.url) as client:
        yield client


def image(seed: int) -> Image.Image:
    return Image.fromarray(golden_image(seed, 40, 50))


def png(seed: int) -> bytes:
    data = io.BytesIO()
    image(seed).save(data, "PNG")
    return data.getvalue()


def asked(*parts: Any) -> list[dict[str, Any]]:
    """Return a conversation of texts, parts and images."""
    content = [
        part
        if isinstance(part, dict)
        else {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def part_of(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image_url(png(seed))}}


async def rolled(client: RLClient, *prompts: Any, **options: Any) -> Rollout:
    greedy: Any = {"temperature": 0.0, "max_tokens": 8, "model": MODEL}
    return await client.rollout(prompts, **(greedy | options))


def tokens(rollout: Rollout) -> list[list[int]]:
    return [list(sample.token_ids) for sample in rollout.samples]


async def test_all_forms_of_a_prompt_with_a_image_are_equal(
    client: RLClient, server: ServerProcess, tmp_path: Path
) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(png(1))
    rollout = await rolled(
        client,
        *(asked("w20", shown, "w21") for shown in (png(1), image(1), path, part_of(1))),
        {"text": "user: w20 <image> w21 assistant:", "images": [path]},
        {"token_ids": [USER, 20, IMAGE, 21, ASSISTANT], "images": [png(1)]},
        {"token_ids": [USER, 20, *[IMAGE] * NUM_TOKENS, 21, ASSISTANT], "images": [image(1)]},
        asked("w20", png(2), "w21"),
    )
    *equal, other = tokens(rollout)
    assert all(each == equal[0] for each in equal)
    assert other != equal[0]
    prompts = [group.prompt.token_ids for group in rollout.groups]
    assert prompts == [[USER, 20, *[IMAGE] * NUM_TOKENS, 21, ASSISTANT]] * 8
    assert rollout.usage["prompt_tokens_details"]["image_tokens"] == 8 * NUM_TOKENS
    chat = httpx2.post(
        f"{server.url}/v1/chat/completions",
        json={
            "model": MODEL,
            "messages": asked("w20", part_of(1), "w21"),
            "max_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
        },
    ).json()
    assert chat["choices"][0]["token_ids"] == equal[0]


@pytest.mark.parametrize("model", [MODEL, QWEN])
async def test_scores_are_what_sampling_said(client: RLClient, model: str) -> None:
    rollout = await rolled(
        client,
        asked("w20", png(1), "w21", png(2)),
        asked("w20", png(2), "w21", png(1)),
        "w20 w21",
        model=model,
        n=2,
        temperature=1.5,
        seed=5,
        logprobs_mode="raw_logprobs",
    )
    of_groups = [[png(1), png(2)], [png(2), png(1)], []]
    items = [
        (group.prompt.token_ids or [], sample.token_ids)
        for group in rollout.groups
        for sample in group.samples
    ]
    images = [shown for shown in of_groups for _ in range(2)]
    scores = await client.logprobs(items, images=images, model=model, cache_salt="fresh")
    for score, sample in zip(scores, rollout.samples, strict=True):
        assert score.logprobs == pytest.approx(list(sample.logprobs), abs=TOLERANCE)
    swapped = await client.logprobs(items[:1], images=[[png(2), png(1)]], model=model)
    assert list(swapped[0].logprobs) != pytest.approx(list(scores[0].logprobs), abs=TOLERANCE)


async def test_a_later_turn_brings_images_of_its_own(client: RLClient) -> None:
    first = await rolled(client, asked("w20", png(1)))
    (sample,) = first.samples
    known = [*(first.groups[0].prompt.token_ids or []), *sample.token_ids]
    later = asked("w30 <image>", png(2))
    item: dict[str, Any] = {"token_ids": known, "append_messages": later, "images": [png(1)]}
    both, without = (
        await rolled(client, item),
        await rolled(
            client, {"token_ids": known, "append_messages": asked("w30"), "images": [png(1)]}
        ),
    )
    prompt = both.groups[0].prompt.token_ids or []
    # The mark that was typed stays text: two halves that are no words of the vocabulary.
    assert prompt[len(known) :] == [USER, 30, 1, 1, *[IMAGE] * NUM_TOKENS, ASSISTANT]
    assert both.usage["prompt_tokens_details"]["image_tokens"] == 2 * NUM_TOKENS
    assert (without.groups[0].prompt.token_ids or [])[len(known) :] == [USER, 30, ASSISTANT]
    text = await rolled(
        client,
        {"token_ids": known, "append_text": " w30 <image>", "images": [png(1), png(2)]},
    )
    assert text.usage["prompt_tokens_details"]["image_tokens"] == 2 * NUM_TOKENS


@pytest.mark.parametrize(
    ("prompt", "param", "why"),
    [
        (asked("w20", b"GIF8 none"), "prompts[1].messages[0].content[1].image_url", "GIF"),
        ({"text": "w20", "images": [png(1)]}, "prompts", "0 placeholders <image> for 1 images"),
        ({"token_ids": [IMAGE] * 15, "images": [png(1)]}, "prompts", "15 placeholders"),
        ({"text": "w <image>", "images": ["http://127.0.0.1/x"]}, "prompts[1].images[0]", "not"),
        ({"messages": asked("w20"), "images": [png(1)]}, "prompts", "images in messages"),
        (
            {"token_ids": [4], "append_messages": asked("w20", b"no")},
            "prompts[1].append_messages[0].content[1].image_url",
            "not an image",
        ),
    ],
)
async def test_bad_images_are_refused_by_their_place(
    client: RLClient, prompt: Any, param: str, why: str
) -> None:
    with pytest.raises(RequestFailedError, match=why) as caught:
        await rolled(client, "w20", prompt)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_a_file_that_is_not_there_is_refused_by_the_client(client: RLClient) -> None:
    with pytest.raises(ValueError, match=r"content\[1\] cannot be read"):
        await rolled(client, asked("w20", Path("/does/not/exist.png")))


async def test_images_may_be_resized_to_a_number_of_pixels(client: RLClient) -> None:
    prompt = asked("w30", Image.fromarray(golden_image(1, 140, 196)))
    sizes = [
        (await rolled(client, prompt, model=QWEN, **options)).usage["prompt_tokens"]
        for options in ({}, {"mm_processor_kwargs": {"max_pixels": 56 * 84}})
    ]
    assert sizes[0] - sizes[1] > 10
    for model, kwargs, why in (
        (MODEL, {"max_pixels": 1000}, "neither min_pixels nor max_pixels"),
        (QWEN, {"num_crops": 4}, "not 'num_crops'"),
        (QWEN, {"max_pixels": 10**12}, "at most the model's"),
        (QWEN, {"max_pixels": "7"}, "the numbers"),
    ):
        with pytest.raises(RequestFailedError, match=why) as caught:
            await rolled(client, prompt, model=model, mm_processor_kwargs=kwargs)
        assert caught.value.param == "mm_processor_kwargs"


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    return httpx2.post(f"{server.url}{path}", json=body).json()


LARGE_FILE = io.BytesIO()
Image.fromarray(golden_image(1, 140, 196)).save(LARGE_FILE, "PNG")
LARGE = image_url(LARGE_FILE.getvalue())
SOURCE = {"type": "base64", "media_type": "image/png", "data": LARGE.partition(",")[2]}
# ROUTES: bodies about a large image, in the form of each route, and where its tokens are counted.
ROUTES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/responses": (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": LARGE}]},
            ],
            "max_output_tokens": 2,
        },
        ("usage", "input_tokens"),
    ),
    "/v1/responses/input_tokens": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": LARGE}]}]},
        ("input_tokens",),
    ),
    "/v1/messages/count_tokens": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
        ("input_tokens",),
    ),
    "/generate": (
        {
            "text": "user: <|image_pad|> assistant:",
            "image_data": LARGE,
            "sampling_params": {"max_new_tokens": 2},
        },
        ("meta_info", "prompt_tokens"),
    ),
    "/inference/v1/generate": (
        {
            "token_ids": [IMAGE_PAD, IMAGE_PAD + 30],
            "content_parts": [{"type": "image_url", "url": LARGE}],
            "sampling_params": {"max_tokens": 2},
        },
        ("usage", "prompt_tokens"),
    ),
}


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_resizes_or_refuses(server: ServerProcess, path: str) -> None:
    body, places = ROUTES[path]
    counts: list[int] = []
    for options in ({}, {"mm_processor_kwargs": {"max_pixels": 56 * 84}}):
        count: Any = post(server, path, model=QWEN, **body, **options)
        for place in places:
            count = count[place]
        counts.append(count)
    assert counts[0] - counts[1] > 10
    refused = post(server, path, model=QWEN, **body, mm_processor_kwargs={"num_crops": 4})
    assert "num_crops" in refused["error"]["message"]


def scores(answer: dict[str, Any]) -> list[float]:
    """Return the log-probability of each prompt token but the first."""
    entries = answer["prompt_logprobs"][1:]
    return [value["logprob"] for entry in entries for value in entry.values()]


def test_vllm_token_route_takes_parts(server: ServerProcess) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "sampling_params": {"temperature": 0, "max_tokens": 8, "prompt_logprobs": 0},
        "return_token_ids": True,
    }
    url = image_url(png(1))
    parts = [{"type": "image_url", "url": url, "uuid": "a"}]
    path = "/inference/v1/generate"
    first = post(server, path, **body, token_ids=[USER, 20, IMAGE, ASSISTANT], content_parts=parts)
    whole = [USER, 20, *[IMAGE] * NUM_TOKENS, ASSISTANT]
    assert first["prompt_token_ids"] == whole
    assert first["mm_placeholders"] == {"image": [{"offset": 2, "length": NUM_TOKENS}]}
    assert first["usage"]["prompt_tokens_details"]["image_tokens"] == NUM_TOKENS
    assert len(first["prompt_logprobs"]) == len(whole)
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    again = post(server, path, **body, token_ids=whole, content_parts=parts)
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert scores(again) == pytest.approx(scores(first), abs=TOLERANCE)
    later = [*whole, *first["choices"][0]["token_ids"], USER, IMAGE, ASSISTANT]
    parts += [{"type": "image_url", "url": image_url(png(2))}]
    two = post(server, path, **body, token_ids=later, content_parts=parts)
    assert [each["length"] for each in two["mm_placeholders"]["image"]] == [NUM_TOKENS] * 2
    for wrong, param in (
        ({"features": {"mm_hashes": {"image": ["a"]}}}, "features"),
        ({"content_parts": [{"type": "video_url", "url": url}]}, "content_parts[0]"),
        ({"content_parts": [{"type": "image_url", "uuid": "a"}]}, "content_parts[0]"),
        ({"content_parts": parts}, "token_ids"),
    ):
        refused = post(server, path, **body, token_ids=[USER, IMAGE], **wrong)
        assert refused["error"]["param"] == param


def test_sglang_scores_prompts_with_images(server: ServerProcess) -> None:
    whole = [USER, 20, *[IMAGE] * NUM_TOKENS, 21, 22, ASSISTANT]
    answer = post(
        server,
        "/generate",
        model=MODEL,
        input_ids=[whole, [USER, 20, IMAGE, 21, 22, ASSISTANT]],
        image_data=[image_url(png(1)), [image_url(png(1))]],
        sampling_params={"temperature": 0, "max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=2 + NUM_TOKENS,
    )
    infos = [each["meta_info"]["input_token_logprobs"] for each in answer]
    assert [each[1] for each in infos[0]] == [21, 22, ASSISTANT]
    assert [each[0] for each in infos[0][1:]] == pytest.approx([each[0] for each in infos[1][1:]])


def test_prompt_logprobs_of_chats_are_the_models(server: ServerProcess) -> None:
    """Check that the answer's tokens have the same scores when they are part of the prompt."""
    messages = asked(part_of(1), "w20")
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6, "logprobs": True}
    path = "/v1/chat/completions"
    asked_once = post(server, path, **body, messages=messages, return_token_ids=True)
    choice = asked_once["choices"][0]
    turn = {"role": "assistant", "content": choice["message"]["content"]}
    scored = post(
        server,
        path,
        **body | {"max_tokens": 1, "messages": [*messages, turn]},
        add_generation_prompt=False,
        prompt_logprobs=0,
    )
    expected = {
        str(token_id): entry["logprob"]
        for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)
    }
    entries = scored["prompt_logprobs"][-len(expected) :]
    assert len(scored["prompt_logprobs"]) == scored["usage"]["prompt_tokens"]
    for entry in entries:
        ((token_id, value),) = entry.items()
        assert value["logprob"] == pytest.approx(expected[token_id], abs=TOLERANCE)
