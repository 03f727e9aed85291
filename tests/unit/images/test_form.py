"""The tokens of a model's images follow from its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.images.form import image_form


class Tokenizer:
    """A tokenizer whose template writes texts only. Implements ``ImageTokenizer``."""

    def token_id(self, token: str) -> int | None:
        del token
        return 5

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /) -> str:
        return str(messages[0]["content"])


@pytest.mark.parametrize(("layers", "rows"), [([], 1), ([0, 2], 3)])
def test_rows_for_further_layers_are_counted(
    layers: Sequence[int], rows: int, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    config = {
        "model_type": "qwen3_vl",
        "vision_config": {"spatial_merge_size": 2, "deepstack_visual_indexes": layers},
    }
    assert image_form(tmp_path, config, Tokenizer(), 128).row_bytes == 128 * rows
