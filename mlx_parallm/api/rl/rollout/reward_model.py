"""Has a reward model of this server say what a sample is worth."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.api.chat.schema import ChatMessage, turns_of
from mlx_parallm.api.pooling.inputs.encode import Reading
from mlx_parallm.api.pooling.scores.rewards import Text, reward_inputs, reward_model, reward_of
from mlx_parallm.api.rl.rollout.groups import Group, Judge, Verdict
from mlx_parallm.api.rl.rollout.schema import RewardModel, RolloutItem
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.serving.interface import PoolingClient
from mlx_parallm.types.errors import InvalidRequestError, ParallmError

_FIELDS = {"model": "reward_model", "messages": "prompts"}


class RewardScorer(Judge):
    """Reads samples with what they continue."""

    def __init__(
        self,
        client: PoolingClient,
        settings: RewardModel,
        items: Sequence[RolloutItem],
        tokenizer: Tokenizer,
        *,
        rollout_id: str,
    ) -> None:
        """Check what can be checked before anything is sampled.

        Args:
            client: where the model is.
            settings: which model, and how it reads.
            items: the prompts.
            tokenizer: of the model that samples: prompts of token ids are read as its text.
            rollout_id: begins the ids of the work.

        Raises:
            InvalidRequestError: there is no such model, or it cannot read a prompt.
        """
        self._client = client
        self._settings = settings
        self._tokenizer = tokenizer
        self._id = rollout_id
        with named_by(_FIELDS):
            self._model = reward_model(client, settings.model, "classify")
            self._prompts = [_prompt(item) for item in items]
        longest = self._model.info.max_model_len
        if (settings.truncate_prompt_tokens or 1) not in (-1, *range(1, longest + 1)):
            raise InvalidRequestError(
                f"truncate_prompt_tokens is -1 or from 1 to {longest}.", param="reward_model"
            )
        if self._model.tokenizer.has_chat_template:
            return
        for number, prompt in enumerate(self._prompts):
            if not isinstance(prompt, str | None):
                raise InvalidRequestError(
                    f"prompts[{number}]: {settings.model} has no chat template: give the prompt a "
                    "reward_prompt that is a text.",
                    param="prompts",
                )

    async def judge(self, group: Group, index: int) -> Verdict:
        """Return the reward of a sample, or why there is none."""
        try:
            inputs = await reward_inputs(
                [self._text(group, index)],
                self._model,
                "classify",
                Reading(
                    truncate=self._settings.truncate_prompt_tokens,
                    from_left=self._settings.truncation_side == "left",
                    param="texts",
                ),
                template_kwargs={},
            )
            request_id = f"reward-{self._id}-{group.number}-{index}"
            (logits,) = await self._client.encode(self._model.request(request_id, inputs))
        except ParallmError as problem:
            return Verdict(error=str(problem))
        return Verdict(reward=reward_of(logits, sigmoid=self._settings.sigmoid))

    def _text(self, group: Group, index: int) -> Text:
        prompt, sampled = self._prompts[group.number], group.samples[index].text
        if prompt is None:
            prompt = self._tokenizer.decode(group.request.prompt_ids, skip_special_tokens=True)
        if isinstance(prompt, str):
            return prompt + sampled
        return [*prompt, {"role": "assistant", "content": sampled}]


def _prompt(item: RolloutItem) -> Text | None:
    """Return what comes before the samples; None: the text of the prompt's token ids."""
    prompt = item.reward_prompt or item.text or item.messages
    return _messages(prompt) if isinstance(prompt, list) else prompt


def _messages(messages: Sequence[ChatMessage]) -> Text:
    return template_messages(turns_of(messages))
