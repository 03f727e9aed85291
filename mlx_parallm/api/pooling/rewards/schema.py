"""The body of ``POST /v1/rewards/score``."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.chat.schema import ChatMessage
from mlx_parallm.api.http.forms import NullIsAbsent
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS, PoolingFields
from mlx_parallm.api.turns.fields import TemplateKwargs
from mlx_parallm.types.errors import InvalidRequestError

Completion = StrictStr | list[ChatMessage]
# KINDS: a body has exactly one of these fields.
KINDS = ("texts", "chats", "completions", "prompts")


class RewardPrompt(NullIsAbsent):
    """A prompt with its completions."""

    model_config = ConfigDict(extra="forbid")

    prompt: StrictStr | list[ChatMessage] = Field(description="A text, or a conversation.")
    completions: list[Completion] = Field(
        min_length=1, max_length=MAX_INPUTS, description="Each a text, or messages."
    )


class RewardsRequest(PoolingFields):
    """Texts, conversations, or completions of prompts; exactly one of the three."""

    texts: list[StrictStr] | None = Field(
        None, min_length=1, max_length=MAX_INPUTS, description="Read as they are."
    )
    chats: list[list[ChatMessage]] | None = Field(
        None,
        min_length=1,
        max_length=MAX_INPUTS,
        description="Conversations, by the reward model's chat template.",
    )
    prompt: StrictStr | list[ChatMessage] | None = Field(
        None, description="What comes before each of the completions."
    )
    completions: list[Completion] | None = Field(
        None, min_length=1, max_length=MAX_INPUTS, description="Each a text, or messages."
    )
    prompts: list[RewardPrompt] | None = Field(
        None, min_length=1, max_length=MAX_INPUTS, description="Several with their completions."
    )
    sigmoid: StrictBool = Field(False, description="Rewards from 0 to 1.")
    step_token: StrictStr | StrictInt | None = Field(
        None, description="A token, or its id, that ends a step: each gets a reward."
    )
    chat_template_kwargs: TemplateKwargs

    @property
    def param(self) -> str:
        """Return the field with the texts to be scored.

        Raises:
            InvalidRequestError: the body has not exactly one kind.
        """
        kinds = [name for name in KINDS if getattr(self, name) is not None]
        if len(kinds) != 1 or (self.prompt is None) != (self.completions is None):
            raise InvalidRequestError(
                "Give texts, chats, prompts, or a prompt with completions.",
                param=kinds[-1] if kinds else "texts",
            )
        return kinds[0]

    def scored(self) -> list[Scored]:
        """Return all texts and conversations to be scored, in order.

        Raises:
            InvalidRequestError: see ``param``; or they are too many.
        """
        param = self.param
        if self.prompts is not None:
            scored = [
                Scored(_joined(prompt.prompt, completion, param), number)
                for number, prompt in enumerate(self.prompts)
                for completion in prompt.completions
            ]
        elif self.prompt is not None:
            scored = [Scored(_joined(self.prompt, each, param)) for each in self.completions or ()]
        else:
            scored = [Scored(content) for content in self.texts or self.chats or ()]
        if len(scored) > MAX_INPUTS:
            raise InvalidRequestError(
                f"A request can have at most {MAX_INPUTS} texts.", param=param
            )
        return scored


@dataclass(frozen=True, slots=True)
class Scored:
    """A text or conversation that gets a reward.

    Attributes:
        content: a text, read as it is, or a conversation, read by the chat template.
        prompt_index: index of the prompt that it follows; None if there are not several.
    """

    content: Completion
    prompt_index: int | None = None


def _joined(prompt: Completion, completion: Completion, param: str) -> Completion:
    """Return a prompt with its completion: two texts, or messages and a turn or messages."""
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise InvalidRequestError("The completion of a text must be a text.", param=param)
        return prompt + completion
    if isinstance(completion, str):
        completion = [ChatMessage(role="assistant", content=completion)]
    return [*prompt, *completion]
