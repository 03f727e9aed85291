"""The body of ``/generate``: SGLang's, and on the same route that of atropos for vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.http.forms import INT64, Ids, PromptIds, PromptTexts
from mlx_parallm.api.turns.fields import ProcessorKwargs, SamplingFields
from mlx_parallm.api.vllm.schema import TokenSamplingParams
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import MAX_CHOICES

DEFAULT_MAX_NEW_TOKENS = 128
# What would change the answer and is not offered here.
UNSUPPORTED_SAMPLING = ("beam_width", "structural_tag")
UNSUPPORTED = (
    "audio_data",
    "custom_logit_processor",
    "input_embeds",
    "max_thinking_tokens",
    "return_hidden_states",
    "return_routed_experts",
    "return_sampling_mask",
    "session_params",
    "video_data",
)


class SglangSamplingParams(SamplingFields):
    """SGLang's sampling parameters."""

    without_effect = frozenset(
        ["spaces_between_special_tokens", "stream_interval", *UNSUPPORTED_SAMPLING]
    )

    n: StrictInt = Field(1, ge=1, le=MAX_CHOICES, description="Samples of each prompt.")
    max_new_tokens: StrictInt = Field(
        DEFAULT_MAX_NEW_TOKENS, ge=0, description="Most tokens to generate."
    )
    min_new_tokens: StrictInt = Field(0, ge=0, description="No end before this many tokens.")
    sampling_seed: StrictInt | None = Field(
        None, ge=-INT64, lt=INT64, description="Fixes the samples; sample i uses it + i."
    )
    no_stop_trim: StrictBool = Field(False, description="Leave the stop text in the answer.")


# Each entry is a form of its own: to check these many takes 0.1 s.
SamplingList = Annotated[list[SglangSamplingParams], Field(max_length=8192, fail_fast=True)]


class VllmPrompt(BaseModel):
    """A prompt of vLLM's own."""

    model_config = ConfigDict(extra="ignore")

    prompt_token_ids: Ids = Field(min_length=1, description="The prompt.")


class GenerateBody(TokenSamplingParams):
    """One prompt or several, as text or token ids.

    With ``prompt`` it is atropos' body for vLLM, whose sampling parameters are fields of their own;
    without, it is SGLang's, whose are in ``sampling_params``.
    """

    without_effect = frozenset(
        [
            "background",
            "conversation_id",
            "custom_labels",
            "log_metrics",
            "no_logs",
            "require_reasoning",
            "routing_key",
            "session_id",
            *UNSUPPORTED,
        ]
    )

    data_parallel_rank: StrictInt | None = Field(
        None, description="The number of the engine that answers; null: the server chooses."
    )
    routed_dp_rank: StrictInt | None = Field(
        None, description="A newer name of data_parallel_rank, which it replaces."
    )
    prompt: VllmPrompt | None = Field(None, description="atropos': the prompt, by itself.")
    text: StrictStr | PromptTexts | None = Field(None, description="One text or several.")
    input_ids: Ids | PromptIds | None = Field(
        None, description="Token ids of one prompt or several, used as they are."
    )
    sampling_params: SglangSamplingParams | SamplingList = Field(
        default_factory=lambda: SglangSamplingParams.model_validate({}),
        description="For all prompts, or one for each.",
    )
    return_logprob: StrictBool | list[StrictBool] = Field(
        False, description="Log-probabilities of sampled tokens."
    )
    logprob_start_len: StrictInt | list[StrictInt] = Field(
        -1, description="Those of the prompt too, from this place on; -1: none."
    )
    top_logprobs_num: StrictInt | list[StrictInt] = Field(
        0, description="Likeliest tokens at each place."
    )
    token_ids_logprob: list[StrictInt] | list[list[StrictInt]] | None = Field(
        None, description="Report these tokens for each sampled one."
    )
    image_data: StrictStr | list[StrictStr | list[StrictStr] | None] | None = Field(
        None,
        description="Images in place of the prompt's placeholders, as URLs or base64: of one "
        "prompt, or an entry for each.",
    )
    mm_processor_kwargs: ProcessorKwargs = None
    return_text_in_logprobs: StrictBool = Field(False, description="The text of each token.")
    return_prompt_token_ids: StrictBool = Field(False, description="Give back the prompts' tokens.")
    return_entropy: StrictBool = Field(
        False, description="The entropy for each sampled token; with return_logprob."
    )
    stream: StrictBool = Field(False, description="Answer by server-sent events, each cumulative.")
    rid: StrictStr | list[StrictStr] | None = Field(
        None, description="Ids of the requests; must be unique."
    )
    model: StrictStr | None = Field(None, description="A served model; default: the first.")
    lora_path: StrictStr | list[StrictStr | None] | None = Field(
        None, description="The names of adapters."
    )
    priority: StrictInt = Field(0, ge=-INT64, lt=INT64, description="Lower runs first.")
    extra_key: StrictStr | list[StrictStr] | None = Field(
        None, description="Share cached prefixes only with the same key."
    )
    cache_salt: StrictStr | list[StrictStr] | None = Field(
        None, description="Share cached prefixes only with the same salt."
    )

    def check_fields(self) -> None:
        """Refuse what is not offered, and anything but one kind of prompt.

        Raises:
            InvalidRequestError: see there.
        """
        self.refuse(*UNSUPPORTED)
        kinds = {"prompt": self.prompt, "text": self.text, "input_ids": self.input_ids}
        present = [name for name, value in kinds.items() if value is not None]
        if len(present) != 1:
            raise InvalidRequestError(
                "Exactly one of text, input_ids and prompt is needed.",
                param=present[-1] if present else "input_ids",
            )
        if self.prompt is not None and self.stream:
            raise InvalidRequestError("This body cannot be answered by a stream.", param="stream")


def prompts_of(body: GenerateBody) -> list[str | list[int]]:
    """Return every prompt of SGLang's: a text or token ids."""
    prompts: Any = body.text if body.text is not None else body.input_ids
    return prompts if is_batch(body) else [prompts]


def is_batch(body: GenerateBody) -> bool:
    """True if several prompts were sent, so that the answer is a list."""
    if isinstance(body.text, list):
        return True
    return bool(body.input_ids) and isinstance(body.input_ids[0], list)
