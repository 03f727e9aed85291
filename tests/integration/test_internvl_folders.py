"""InternVL in its authors' folders is the same model as in those of transformers."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.config import ModelConfig
from mlx_parallm.models.vision.checkpoint import TOWER
from mlx_parallm.worker.weights.loader import load_model
from tests.integration.test_llm_images import asked, png
from tests.internvl_folders import write_internvl, write_internvl_chat

NAMES = ("internvl", "internvl_large")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_authors_names_of_weights_are_read(name: str, tmp_path: Path) -> None:
    folders = write_internvl(tmp_path / "a", name), write_internvl_chat(tmp_path / "b", name)
    expected, authors = (
        dict(tree_flatten(load_model(ModelConfig(), folder).model.parameters()))
        for folder in folders
    )
    assert authors.keys() == expected.keys()
    assert all(mx.array_equal(authors[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_authors_folders_answer_alike(name: str, tmp_path: Path) -> None:
    folders = write_internvl(tmp_path / "a", name), write_internvl_chat(tmp_path / "b", name)
    chats = [
        asked({"type": "image", "image": png(1)}),
        # This image is 7 tiles.
        asked({"type": "image", "image": png(2, (60, 90))}),
        asked({"type": "text", "text": "w40 <IMG_CONTEXT> <image> w41"}),
    ]
    expected, authors = (LLM(str(folder)).chat(chats, GREEDY) for folder in folders)
    for own, other in zip(authors[:2], expected[:2], strict=True):
        assert own.prompt_token_ids == other.prompt_token_ids
        assert own.outputs[0].token_ids == other.outputs[0].token_ids
    lengths = [len(output.prompt_token_ids) for output in authors]
    # A tile is 4 rows; around them are two marks, "user:", two words and "assistant:".
    assert lengths[:2] == [4 + 6, 4 * 7 + 6]
    assert authors[0].outputs[0].token_ids != authors[1].outputs[0].token_ids
    # What a user types is no image.
    context = expected[0].prompt_token_ids[2]
    assert all(context not in output.prompt_token_ids for output in (authors[2], expected[2]))


@pytest.mark.parametrize(
    ("changes", "tiles"),
    [
        ({"dynamic_image_size": False}, 1),
        ({"max_dynamic_patch": 1}, 1),
        ({"max_dynamic_patch": 2}, 3),
        ({"min_dynamic_patch": 6}, 7),
    ],
)
def test_images_have_as_many_tiles_as_the_config_says(
    changes: dict[str, int], tiles: int, tmp_path: Path
) -> None:
    llm = LLM(str(write_internvl_chat(tmp_path / "model", "internvl", **changes)))
    (output,) = llm.chat(asked({"type": "image", "image": png(1, (60, 40))}), GREEDY)
    assert len(output.prompt_token_ids) == 4 * tiles + 6


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"use_thumbnail": False}, "use_thumbnail False"),
        ({"pad2square": True}, "pad2square True"),
        ({"ps_version": "v1"}, "ps_version v1"),
        ({"force_image_size": 64}, "force_image_size 64 with a tower for 32"),
    ],
)
def test_other_settings_of_the_authors_are_served_as_text(
    changes: dict[str, object], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_internvl_chat(tmp_path / "model", "internvl", **changes)
    assert getattr(load_model(ModelConfig(), folder).model, TOWER, None) is None
    assert f"read as a text model: its config.json has {why}" in caplog.text
