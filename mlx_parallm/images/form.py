"""Image inputs of one model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.images.families import FAMILIES, ImageFamily
from mlx_parallm.types.content import digest_of
from mlx_parallm.types.errors import InvalidRequestError

# PROCESSOR_FILES: where a folder has the settings of its image processor; the first one counts.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class ImageTokenizer(Protocol):
    """Methods of a tokenizer that images need."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if it is not one token."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /) -> str:
        """Return a conversation as text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageForm:
    """Settings of a model's image inputs. They can be pickled.

    Attributes:
        family: how images are written.
        folder: has the settings of the image processor.
        feature_id: id of the feature token.
        template_reads_parts: True if the chat template writes images of content parts; False if
            it reads texts only, so that placeholders are put into these.
        row_bytes: size of one row of features, with those of further layers.
        fingerprint: digest of the processor's settings.
    """

    family: ImageFamily
    folder: Path
    feature_id: int
    template_reads_parts: bool
    row_bytes: int
    fingerprint: str


def image_form(
    folder: Path, config: Mapping[str, Any], tokenizer: ImageTokenizer, row_bytes: int
) -> ImageForm:
    """Return how a model takes images.

    Args:
        folder: of the model.
        config: its ``config.json``, of a family in ``FAMILIES``.
        tokenizer: its own.
        row_bytes: size of one row of features.

    Raises:
        ValueError: the folder has no image processor, or the tokenizer has no feature token.
    """
    family = FAMILIES[config["model_type"]](config)
    settings = _processor_settings(folder)
    feature_id = tokenizer.token_id(family.feature_token)
    if feature_id is None:
        raise ValueError(f"the tokenizer has no token {family.feature_token}")
    return ImageForm(
        family=family,
        folder=folder,
        feature_id=feature_id,
        template_reads_parts=_shows(tokenizer, [{"type": "image"}], family.placeholder),
        row_bytes=row_bytes * (1 + family.num_added_layers),
        fingerprint=digest_of("images", settings, repr(sorted(family.processor.items()))),
    )


def _processor_settings(folder: Path) -> bytes:
    for name in PROCESSOR_FILES:
        if (folder / name).exists():
            content = (folder / name).read_bytes()
            json.loads(content)
            return content
    raise ValueError(f"the folder has none of {', '.join(PROCESSOR_FILES)}")


def _shows(tokenizer: ImageTokenizer, content: Any, text: str) -> bool:
    """True if the chat template writes ``text`` for a message with this content."""
    try:
        return text in tokenizer.render_chat([{"role": "user", "content": content}])
    except InvalidRequestError:
        return False
