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
SOURCE_FIELDS = ("decoder_prompt", "decoder_input_ids", "src_lang", "tgt_lang")


class CompletionRequest(GenerationRequest):
    """One prompt or several, as text or token ids."""

    prompt: StrictStr | PromptTexts | Ids | PromptIds = Field(
        "",
        description="A text, several texts, token ids, or several lists of token ids; it may be "
        "absent or empty beside prompt_embeds. Absent without them, the answer is the beginning of "
        "a document. An encoder-decoder reads it as the source.",
    )
    prompt_embeds: StrictStr | PromptTexts | None = Field(
        None,
        description="One prompt or several as rows of the model's embedding, answered before "
        "those of prompt: a safetensors or .npy file of [rows, width] in base64. Needs "
        "--enable-prompt-embeds.",
    )
    max_tokens: StrictInt = Field(
        DEFAULT_MAX_TOKENS,
        ge=0,
        description="0 scores with echo. An encoder-decoder's default is its files' max_length.",
    )
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

    decoder_prompt: StrictStr | PromptTexts | None = Field(
        None,
        description="Of an encoder-decoder, whose source is prompt: what its output goes on from, "
        "one text or as many as prompts.",
    )
    decoder_input_ids: Ids | PromptIds | None = Field(
        None, description="The same as token ids, the start token included."
    )
    src_lang: StrictStr | None = Field(
        None, description="The language of the source, where the model knows several."
    )
    tgt_lang: StrictStr | None = Field(None, description="The language to translate to.")

    def check_supported(self) -> None:
        """Refuse what this server does not honour yet, by name.

        Raises:
            InvalidRequestError: ``best_of`` over ``n``, or ``echo`` of the tokens of a prompt with
                a suffix; what needs a prompt's tokens, with ``prompt_embeds``.
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

    def check_sources(self, *, takes_sources: bool) -> None:
        """Refuse fields that the model has no use for.

        Raises:
            InvalidRequestError: an encoder-decoder gets a suffix or rows, or another model gets
                what is for decoders of sources.
        """
        names = ("suffix", "prompt_embeds") if takes_sources else SOURCE_FIELDS
        of = "an encoder-decoder" if takes_sources else "a model without an encoder"
        for name in names:
            if getattr(self, name):
                raise InvalidRequestError(
                    f"{name} is not for {of}.", param=name, code="unsupported_parameter"
                )

    def decoder_prompts(self, num_prompts: int) -> list[str | list[int] | None]:
        """Return what the decoder begins with after each source; None: the model's own beginning.

        Raises:
            InvalidRequestError: both fields are there, or they are neither one nor as many as
                prompts.
        """
        if self.decoder_prompt is not None and self.decoder_input_ids is not None:
            raise InvalidRequestError(
                "Give decoder_prompt or decoder_input_ids.", param="decoder_input_ids"
            )
        by_text = self.decoder_prompt is not None
        field = self.decoder_prompt if by_text else self.decoder_input_ids
        if field is None or isinstance(field, str):
            return [field] * num_prompts
        if not by_text and not any(isinstance(each, list) for each in field):
            return [field] * num_prompts  # type: ignore[list-item]
        if len(field) != num_prompts:
            name = "decoder_prompt" if by_text else "decoder_input_ids"
            raise InvalidRequestError(
                f"{name} has {len(field)} entries for {num_prompts} prompts.", param=name
            )
        return list(field)  # type: ignore[arg-type]

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
