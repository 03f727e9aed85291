"""The body of ``POST /v1/rl/rollout``, and the fields that bodies of trainers' routes share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.chat.schema import ChatMessage
from mlx_parallm.api.http.forms import INT64, Ids, NullIsAbsent, Number
from mlx_parallm.api.turns.fields import (
    ProcessorKwargs,
    QueueFields,
    SamplingFields,
    TemplateKwargs,
)
from mlx_parallm.api.turns.images import ImageUrls
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import MAX_CHOICES

MAX_PROMPTS = 65_536
DEFAULT_VERIFIER_TIMEOUT_S = 30.0
MAX_TIMEOUT_S = 86_400.0


class TrainerFields(QueueFields):
    """Which model or adapter is meant, and what the answer is called."""

    model: StrictStr | None = Field(
        None, description="A served model or adapter; default: the first model."
    )
    adapter: StrictStr | None = Field(
        None, description="An adapter, of the model if that is given."
    )
    request_id: StrictStr | None = Field(
        None, min_length=1, max_length=128, description="The answer's id; must be unique."
    )


class TokenFields(TrainerFields):
    """Fields that choose what the answer has for each token."""

    top_logprobs: StrictInt = Field(0, ge=0, description="Likeliest tokens at each place.")
    entropy: StrictBool = Field(False, description="Entropy of the distribution at each place.")
    returns: list[Literal["values"]] | None = Field(
        None,
        validation_alias="return",
        serialization_alias="return",
        description="What else is returned: values, the value head's number for the state that "
        "each token is chosen in, as value_estimates.",
    )
    return_values: StrictBool = Field(False, description="Short for return: values.")

    @property
    def wants_values(self) -> bool:
        """True if the answer has ``value_estimates``."""
        return self.return_values or bool(self.returns)


class RolloutItem(NullIsAbsent):
    """A prompt with what belongs to it alone; exactly one of its first three fields is there."""

    model_config = ConfigDict(extra="forbid")

    text: StrictStr | None = Field(None, description="A text, tokenised as it is.")
    messages: list[ChatMessage] | None = Field(
        None, min_length=1, description="A conversation, rendered by the chat template."
    )
    token_ids: Ids | None = Field(None, min_length=1, description="Token ids, used as they are.")
    append_messages: list[ChatMessage] | None = Field(
        None,
        min_length=1,
        description="With token_ids, which end with an assistant's turn: what was said after it.",
    )
    append_text: StrictStr | None = Field(
        None, min_length=1, description="With token_ids: a text that goes on from them."
    )
    images: ImageUrls | None = Field(
        None,
        description="Images of text or token_ids, in order: URLs or base64. A text has the "
        "model's placeholder once for each; token_ids have that, or all tokens of the image.",
    )
    seed: StrictInt | None = Field(
        None, ge=-INT64, lt=INT64, description="Of this prompt; sample i uses seed + i."
    )
    reward_prompt: StrictStr | list[ChatMessage] | None = Field(
        None, min_length=1, description="What the reward model reads in place of the prompt."
    )
    metadata: dict[str, Any] | None = Field(
        None, description="Given back with the samples, and to the verifier."
    )

    def check(self, where: str) -> None:
        """Refuse fields that exclude each other.

        Raises:
            InvalidRequestError: not exactly one kind of prompt, or something to append to another
                than token ids.
        """
        kinds = (self.text, self.messages, self.token_ids)
        if sum(kind is not None for kind in kinds) != 1:
            raise _wrong(where, "needs exactly one of text, messages and token_ids")
        if self.append_messages is not None and self.append_text is not None:
            raise _wrong(where, "can have append_messages or append_text, not both")
        if self.token_ids is None and (self.append_messages or self.append_text):
            raise _wrong(where, "can append to token_ids only")
        if self.messages is not None and self.images:
            raise _wrong(where, "has its images in messages, or in images beside another prompt")


class Verifier(NullIsAbsent):
    """Source of a sample's reward."""

    model_config = ConfigDict(extra="forbid")

    url: StrictStr = Field(max_length=2048, description="One of those of --verifier-urls.")
    timeout_s: Number = Field(
        DEFAULT_VERIFIER_TIMEOUT_S, gt=0, le=600, description="For each sample, in seconds."
    )


class RewardModel(NullIsAbsent):
    """A classifier of this server that says what a sample is worth."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr = Field(description="Its name; it has one label or two.")
    sigmoid: StrictBool = Field(False, description="Rewards from 0 to 1.")
    truncate_prompt_tokens: StrictInt | None = Field(
        None, ge=-1, description="Cut what it reads to so many tokens; -1 to what it takes."
    )
    truncation_side: Literal["left", "right"] = Field(
        "right", description="The end at which it is cut."
    )


class RolloutRequest(TokenFields, SamplingFields):
    """Prompts, each to be continued ``n`` times."""

    prompts: list[StrictStr | list[StrictInt] | list[ChatMessage] | RolloutItem] = Field(
        min_length=1,
        max_length=MAX_PROMPTS,
        description="Each a text, token ids, messages, or an object with one of them.",
    )
    n: StrictInt = Field(1, ge=1, le=MAX_CHOICES, description="Samples of each prompt.")
    max_tokens: StrictInt | None = Field(
        None, ge=1, description="Most tokens of a sample; default: the rest of the context."
    )
    seeds: list[StrictInt] | None = Field(
        None, description="One per prompt; sample i of a prompt uses its seed + i."
    )
    prompt_logprobs: StrictInt | None = Field(
        None, ge=0, description="Score the prompts, with so many alternatives per token."
    )
    stream: StrictBool = Field(False, description="An event for each sample when it is finished.")
    timeout_s: Number | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, description="After it, samples end as they are: abort."
    )
    verifier: Verifier | None = Field(None, description="Gives each finished sample a reward.")
    reward_model: RewardModel | None = Field(
        None, description="Gives each finished sample a reward, in place of a verifier."
    )
    return_prompt_token_ids: StrictBool = Field(True, description="Give back the prompts' tokens.")
    tools: list[dict[str, Any]] | None = Field(
        None, description="Tools that the template lists, for messages."
    )
    chat_template_kwargs: TemplateKwargs
    mm_processor_kwargs: ProcessorKwargs = None
    add_generation_prompt: StrictBool = Field(True, description="Open the assistant's turn.")
    add_special_tokens: StrictBool = Field(
        True, description="Tokenise texts with the model's special tokens, such as BOS."
    )

    def items(self) -> list[RolloutItem]:
        """Every prompt as an object.

        Raises:
            InvalidRequestError: one is malformed, there are not as many seeds, or two say what
                samples are worth.
        """
        if self.verifier is not None and self.reward_model is not None:
            raise InvalidRequestError(
                "A rollout has a verifier or a reward model.", param="reward_model"
            )
        if self.seeds is not None and len(self.seeds) != len(self.prompts):
            raise InvalidRequestError("seeds needs one seed per prompt.", param="seeds")
        for seed in self.seeds or ():
            if not -INT64 <= seed < INT64:
                raise InvalidRequestError("A seed has 64 bits.", param="seeds")
        items = [_item(prompt) for prompt in self.prompts]
        for number, item in enumerate(items):
            item.check(f"prompts[{number}]")
        return items


def _item(prompt: str | list[int] | list[ChatMessage] | RolloutItem) -> RolloutItem:
    if isinstance(prompt, RolloutItem):
        return prompt
    if isinstance(prompt, str):
        return RolloutItem.model_construct(text=prompt)
    if prompt and isinstance(prompt[0], BaseModel):
        return RolloutItem.model_construct(messages=prompt)
    return RolloutItem.model_construct(token_ids=prompt)


def _wrong(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {what}.", param="prompts")
