"""Prompts that callers wrote, as texts or tokens, with their pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.turns.pictures import Pictures, PictureSource
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pictures.processor import AS_CONFIGURED, PixelRange, PreparedPicture
from mlx_parallm.pictures.prompt import PicturePrompt
from mlx_parallm.pictures.written_prompt import written_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPrompt:
    """A prompt as its caller wrote it.

    Attributes:
        prompt: a text, or tokens.
        model: reads it.
        pictures: where its pictures come from, in order.
    """

    prompt: str | Sequence[int]
    model: GenerationModel
    pictures: Sequence[PictureSource] = ()


async def read_prompts(
    prompts: Sequence[WrittenPrompt],
    pictures: Pictures,
    pixel_range: PixelRange = AS_CONFIGURED,
) -> list[PicturePrompt]:
    """Return the tokens and inputs of each prompt; off the event loop where that takes long.

    Raises:
        InvalidRequestError: a picture cannot be read, or a prompt's placeholders do not fit its
            pictures (param "messages").
    """
    prepared = await pictures.prepare_each(
        ((prompt.pictures, prompt.model) for prompt in prompts), pixel_range
    )

    def work() -> list[PicturePrompt]:
        return [
            read_prompt(prompt.prompt, shown, prompt.model)
            for prompt, shown in zip(prompts, prepared, strict=True)
        ]

    # Tokens of a prompt without pictures are taken as they are.
    length = sum(
        len(prompt.prompt)
        for prompt in prompts
        if isinstance(prompt.prompt, str) or prompt.pictures
    )
    return await maybe_in_thread(work, length)


def read_prompt(
    prompt: str | Sequence[int],
    pictures: Sequence[PreparedPicture],
    model: GenerationModel,
    *,
    add_special_tokens: bool = True,
) -> PicturePrompt:
    """Return a prompt as tokens and inputs.

    Args:
        prompt: a text, or tokens.
        pictures: those of its placeholders, in order.
        model: reads it.
        add_special_tokens: whether a text begins with what a text of the model begins with.

    Raises:
        InvalidRequestError: the placeholders do not fit the pictures (param "messages").
    """
    tokenizer, form = model.tokenizer, model.pictures
    adds = add_special_tokens and isinstance(prompt, str)
    if pictures and form is not None:
        return written_prompt(
            prompt,
            pictures,
            form,
            placeholder_id=tokenizer.token_id(form.family.placeholder),
            encode=lambda text: tokenizer.encode(text, add_special_tokens=adds),
        )
    if isinstance(prompt, str):
        return PicturePrompt(prompt, tuple(tokenizer.encode(prompt, add_special_tokens=adds)))
    return PicturePrompt("", tuple(prompt))
