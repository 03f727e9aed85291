"""Pictures in conversations of ``LLM.chat``."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.types.errors import InvalidRequestError
from tests.picture_folders import write_llava

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(write_llava(tmp_path_factory.mktemp("llava"))))


def picture(seed: int) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (40, 50, 3)).astype(np.uint8)
    return Image.fromarray(pixels)


def png(seed: int) -> bytes:
    content = io.BytesIO()
    picture(seed).save(content, "PNG")
    return content.getvalue()


def asked(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "w30 w31"}]}]


def test_the_forms_of_a_picture_are_equal(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(png(1))
    parts = [
        {"type": "image", "image": image} for image in (png(1), path, str(path), picture(1), png(2))
    ]
    parts.append({"type": "image_pil", "image_pil": picture(1)})
    outputs = llm.chat([asked(part) for part in parts], GREEDY)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3] == tokens[5] != tokens[4]
    assert len(outputs[0].prompt_token_ids) == len(outputs[4].prompt_token_ids) > 16


def test_parts_of_text_need_no_pictures(llm: LLM) -> None:
    (output,) = llm.chat(asked({"type": "text", "text": "w32"}), GREEDY)
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": 7}, "has a int"),
        ({"type": "image", "image": "/none.png"}, "cannot be read"),
        ({"type": "image", "image": b"no picture"}, "picture"),
        ({"type": "video", "video": b""}, "neither a text nor a picture"),
    ],
)
def test_what_is_no_picture_is_refused_by_its_part(
    llm: LLM, part: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        llm.chat(asked(part), GREEDY)
    assert refusal.value.param == "messages[0].content[0]"
