"""Images in conversations of ``LLM.chat``, and in prompts of ``LLM.generate``."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.media.image_file import image_url
from mlx_parallm.types.errors import InvalidRequestError
from tests.image_folders import PARTS, TEXTS, write_llava

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(write_llava(tmp_path_factory.mktemp("llava"))))


def image(seed: int, size: tuple[int, int] = (40, 50)) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (*size, 3)).astype(np.uint8)
    return Image.fromarray(pixels)


def png(seed: int, size: tuple[int, int] = (40, 50)) -> bytes:
    content = io.BytesIO()
    image(seed, size).save(content, "PNG")
    return content.getvalue()


def asked(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "w30 w31"}]}]


def test_the_forms_of_a_image_are_equal(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(png(1))
    parts = [
        {"type": "image", "image": form} for form in (png(1), path, str(path), image(1), png(2))
    ]
    parts.append({"image": png(1)})
    parts.append({"type": "image_pil", "image_pil": image(1)})
    outputs = llm.chat([asked(part) for part in parts], GREEDY)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3] == tokens[5] == tokens[6] != tokens[4]
    assert len(outputs[0].prompt_token_ids) == len(outputs[4].prompt_token_ids) > 16


def test_parts_of_text_need_no_images(llm: LLM) -> None:
    (output,) = llm.chat(asked({"type": "text", "text": "w32"}), GREEDY)
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": 7}, "has a int"),
        ({"type": "image", "image": Image.new("I;16", (3, 2))}, "8 bits a colour"),
        ({"type": "image", "image": "/none.png"}, "cannot be read"),
        ({"type": "image", "image": b"no image"}, "image"),
        ({"type": "video", "video": b""}, "neither a text nor an image"),
    ],
)
def test_what_is_no_image_is_refused_by_its_part(
    llm: LLM, part: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        llm.chat(asked(part), GREEDY)
    assert refusal.value.param == "messages[0].content[0]"


def test_prompts_in_the_form_of_vllm_take_images(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(png(1))
    (chat,) = llm.chat(asked({"type": "image", "image": png(1)}), GREEDY)
    text = "user: <image> w30 w31 assistant:"
    ids = llm.tokenizer.encode(text)
    outputs = llm.generate(
        [
            {"prompt": text, "multi_modal_data": {"image": image(1)}},
            {"prompt": text, "multi_modal_data": {"image": [str(path)]}},
            {"prompt_token_ids": ids, "multi_modal_data": {"image": image_url(png(1))}},
            {"prompt_token_ids": list(chat.prompt_token_ids), "multi_modal_data": {"image": path}},
            {"prompt": "w30 w31"},
            "w30 w31",
        ],
        GREEDY,
    )
    for output in outputs[:4]:
        assert output.prompt_token_ids == chat.prompt_token_ids
        assert output.outputs[0].token_ids == chat.outputs[0].token_ids
    assert outputs[4].outputs[0].token_ids == outputs[5].outputs[0].token_ids
    (alone,) = llm.generate({"prompt": text, "multi_modal_data": {"image": image(1)}}, GREEDY)
    assert alone.outputs[0].token_ids == chat.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ({"prompt": "w30", "multi_modal_data": {"image": png(1)}}, "messages"),
        ({"prompt": "<image>", "multi_modal_data": {"image": [7]}}, "multi_modal_data.image[0]"),
        ({"prompt": "w30", "multi_modal_data": {"video": b""}}, "multi_modal_data"),
        ({"prompt": "w30", "prompt_token_ids": [4]}, "prompt"),
        ({"prompt": "w30", "encoder_prompt": "w31"}, "encoder_prompt"),
    ],
)
def test_prompts_that_cannot_be_read_name_their_part(
    llm: LLM, prompt: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        llm.generate(prompt, GREEDY)
    assert refusal.value.param == param


#: A template that reads parts only, as LLaVA's and Idefics3's do.
PARTS_ONLY = (
    "{% for m in messages %}{{ m.role }}: {% for p in m.content %}"
    "{% if p.type == 'image' %} <image> {% elif p.type == 'text' %} {{ p.text }} {% endif %}"
    "{% endfor %} {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("template", [PARTS, TEXTS, PARTS_ONLY])
def test_texts_reach_every_template_whichever_their_form(tmp_path: Path, template: str) -> None:
    llm = LLM(str(write_llava(tmp_path, template=template)))
    parts = [{"type": "text", "text": "w30 <image>"}, {"type": "text", "text": " w31"}]
    outputs = llm.chat(
        [[{"role": "user", "content": content}] for content in ("w30 <image> w31", parts)], GREEDY
    )
    unknown = llm.tokenizer.encode("unknown")
    expected = llm.tokenizer.encode("user: w30") + unknown * 2
    expected += llm.tokenizer.encode("w31 assistant:")
    # A mark that a user typed is two halves, which this tokenizer does not know.
    assert [list(output.prompt_token_ids) for output in outputs] == [expected, expected]
