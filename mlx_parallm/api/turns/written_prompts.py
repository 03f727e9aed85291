"""Prompts that callers wrote, as texts or tokens, with their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.turns.images import Images, ImageSource
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.images.processor import AS_CONFIGURED, PixelRange, PreparedImage
from mlx_parallm.images.prompt import ImagePrompt
from mlx_parallm.images.written_prompt import written_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPrompt:
    """A prompt as its caller wrote it.

    Attributes:
        prompt: a text, or tokens.
        model: reads it.
        images: where its images come from, in order.
    """

    prompt: str | Sequence[int]
    model: GenerationModel
    images: Sequence[ImageSource] = ()


async def read_prompts(
    prompts: Sequence[WrittenPrompt],
    images: Images,
    pixel_range: PixelRange = AS_CONFIGURED,
) -> list[ImagePrompt]:
    """Return the tokens and inputs of each prompt; off the event loop where that takes long.

    Raises:
        InvalidRequestError: an image cannot be read, or a prompt's placeholders do not fit its
            images (param "messages").
    """
    prepared = await images.prepare_each(
        ((prompt.images, prompt.model) for prompt in prompts), pixel_range
    )

    def work() -> list[ImagePrompt]:
        return [
            read_prompt(prompt.prompt, shown, prompt.model)
            for prompt, shown in zip(prompts, prepared, strict=True)
        ]

    # Tokens of a prompt without images are taken as they are.
    length = sum(
        len(prompt.prompt) for prompt in prompts if isinstance(prompt.prompt, str) or prompt.images
    )
    return await maybe_in_thread(work, length)


def read_prompt(
    prompt: str | Sequence[int],
    images: Sequence[PreparedImage],
    model: GenerationModel,
    *,
    add_special_tokens: bool = True,
) -> ImagePrompt:
    """Return a prompt as tokens and inputs.

    Args:
        prompt: a text, or tokens.
        images: those of its placeholders, in order.
        model: reads it.
        add_special_tokens: whether a text begins with what a text of the model begins with.

    Raises:
        InvalidRequestError: the placeholders do not fit the images (param "messages").
    """
    tokenizer, form = model.tokenizer, model.images
    adds = add_special_tokens and isinstance(prompt, str)
    if images and form is not None:
        return written_prompt(
            prompt,
            images,
            form,
            placeholder_id=tokenizer.token_id(form.family.placeholder),
            encode=lambda text: tokenizer.encode(text, add_special_tokens=adds),
        )
    if isinstance(prompt, str):
        return ImagePrompt(prompt, tuple(tokenizer.encode(prompt, add_special_tokens=adds)))
    return ImagePrompt("", tuple(prompt))
