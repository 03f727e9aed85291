"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.http.forms import Ids, PromptIds, PromptTexts
from mlx_parallm.api.turns.fields import UNSUPPORTED, GenerationRequest
from mlx_parallm.types.errors import InvalidRequestError

DEFAULT_MAX_TOKENS = 16
# IMAGES: where other routes and programs have images. An answer without them would mislead.
IMAGES = ("image_data", "images", "multi_modal_data")


class CompletionRequest(GenerationRequest):
    """One prompt or several, as text or token ids."""

    prompt: StrictStr | PromptTexts | Ids | PromptIds = Field(
        "",
        description="A text, several texts, token ids, or several lists of token ids; it may be "
        "absent or empty beside prompt_embeds. Absent without them, the answer is the beginning of "
        "a document.",
    )
    prompt_embeds: StrictStr | PromptTexts | None = Field(
        None,
        description="One prompt or several as rows of the model's embedding, answered before "
        "those of prompt: a safetensors or .npy file of [rows, width] in base64. Needs "
        "--enable-prompt-embeds.",
    )
    max_tokens: StrictInt = Field(DEFAULT_MAX_TOKENS, ge=0, description="0 scores with echo.")
    logprobs: StrictBool | Annotated[StrictInt, Field(ge=-1)] | None = Field(
        None, description="Alternatives per token; true is 1, -1 all."
    )
    echo: StrictBool = Field(False, description="Begin every answer with its prompt.")
    suffix: StrictStr | None = Field(
        None, description="What stands after the answer, where the model can fill in."
    )
    add_special_tokens: StrictBool = Field(
        True, description="Tokenise texts with the model's special tokens, such as BOS."
    )

    def check_supported(self) -> None:
        """Refuse what this server does not honour yet, by name.

        Raises:
            InvalidRequestError: ``best_of`` over ``n``, beam search, or ``echo`` of the tokens of a
                prompt with a suffix; what needs a prompt's tokens, with ``prompt_embeds``.
        """
        if self.embeds():
            self._check_no_tokens_needed()
        code = "unsupported_parameter"
        if self.suffix and self.echo and self.top() is not None:
            # The tokens of the prompt would be those of another text.
            message = "echo with logprobs is not supported with a suffix."
            raise InvalidRequestError(message, param="echo", code=code)
        best_of = (self.model_extra or {}).get("best_of")
        if best_of is not None and best_of != self.n:
            raise InvalidRequestError("best_of must equal n.", param="best_of", code=code)
        self.refuse(*UNSUPPORTED, *IMAGES)

    def _check_no_tokens_needed(self) -> None:
        for name in ("echo", "suffix", "prompt_logprobs", "truncate_prompt_tokens"):
            if getattr(self, name) not in (None, False, ""):
                raise InvalidRequestError(
                    f"{name} needs a prompt of tokens; prompt_embeds has none.", param=name
                )

    def embeds(self) -> list[str]:
        """Return every prompt that comes as rows, each a file in base64."""
        if self.prompt_embeds is None:
            return []
        return [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds

    def top(self) -> int | None:
        """Return how many alternatives per token; None when no log-probabilities are wanted."""
        if self.logprobs is None or self.logprobs is False:
            return 0 if self.logprob_token_ids else None
        return int(self.logprobs)

    def num_prompts(self) -> int:
        """Return how many prompts there are at most, without a look at each."""
        is_one = isinstance(self.prompt, str) or isinstance(next(iter(self.prompt), None), int)
        return len(self.embeds()) + (1 if is_one else len(self.prompt))

    @property
    def begins_document(self) -> bool:
        """True if there is no prompt of any kind."""
        return "prompt" not in self.model_fields_set and not self.embeds() and not self.suffix

    def prompts(self) -> list[str | list[int]]:
        """Every prompt: a text or a list of token ids.

        Raises:
            InvalidRequestError: there is none, or one is empty and there is no suffix.
        """
        if self.begins_document:
            return []
        prompt = self.prompt
        if isinstance(prompt, str):
            prompts: list[str | list[int]] = [prompt]
        elif prompt and isinstance(prompt[0], int):
            prompts = [prompt]  # type: ignore[list-item]
        else:
            prompts = list(prompt)  # type: ignore[arg-type]
        if self.embeds() and prompts in ([""], []):
            return []
        if not prompts or (any(not prompt for prompt in prompts) and not self.suffix):
            raise InvalidRequestError("prompt must not be empty.", param="prompt")
        return prompts
