"""The body of ``POST /v1/rewards/score``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.chat.schema import ChatMessage
from mlx_parallm.api.http.forms import NullIsAbsent
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS, EncodeFields
from mlx_parallm.api.turns.fields import TemplateKwargs
from mlx_parallm.types.errors import InvalidRequestError

Completion = StrictStr | list[ChatMessage]


class RewardPrompt(NullIsAbsent):
    """A prompt and what may follow it."""

    model_config = ConfigDict(extra="forbid")

    prompt: StrictStr | list[ChatMessage] = Field(description="A text, or a conversation.")
    completions: list[Completion] = Field(
        min_length=1, max_length=MAX_INPUTS, description="Each a text, or messages."
    )


class RewardsRequest(EncodeFields):
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
        None, description="A token, or its id, at whose places a model of tokens says a reward."
    )
    chat_template_kwargs: TemplateKwargs

    def given(self) -> list[Rewarded]:
        """Everything that is to be scored, in its order.

        Raises:
            InvalidRequestError: not exactly one kind is there, or too much of it.
        """
        kinds = [name for name in ("texts", "chats", "completions", "prompts") if self._has(name)]
        if len(kinds) != 1 or (self.prompt is None) != (self.completions is None):
            raise InvalidRequestError(
                "Give texts, chats, prompts, or a prompt with completions.",
                param=kinds[-1] if kinds else "texts",
            )
        found = [Rewarded(param=kinds[0], text=one) for one in self.texts or ()] + [
            Rewarded(param=kinds[0], messages=one) for one in self.chats or ()
        ]
        prompts = self.prompts or []
        if self.prompt is not None:
            prompts = [
                RewardPrompt.model_construct(prompt=self.prompt, completions=self.completions)
            ]
        for number, one in enumerate(prompts):
            place = None if self.prompts is None else number
            found += [_after(one.prompt, each, place, kinds[0]) for each in one.completions]
        if len(found) > MAX_INPUTS:
            raise InvalidRequestError(f"These are more than {MAX_INPUTS}.", param=kinds[0])
        return found

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None


class Rewarded(BaseModel):
    """What is scored: a text, or a conversation.

    Attributes:
        param: the field of the body that it came from.
        text: read as it is.
        messages: by the chat template; one of the two is there.
        prompt_index: which of several prompts it follows.
    """

    param: str
    text: str | None = None
    messages: list[ChatMessage] | None = None
    prompt_index: int | None = None


def _after(
    prompt: str | list[ChatMessage],
    completion: str | list[ChatMessage],
    prompt_index: int | None,
    param: str,
) -> Rewarded:
    """A text goes on with a text; a conversation with a turn of the assistant, or messages."""
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise InvalidRequestError("A text is completed by a text.", param=param)
        return Rewarded(param=param, text=prompt + completion, prompt_index=prompt_index)
    if isinstance(completion, str):
        completion = [ChatMessage(role="assistant", content=completion)]
    return Rewarded(param=param, messages=[*prompt, *completion], prompt_index=prompt_index)
