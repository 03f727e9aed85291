"""The body of ``POST /inference/v1/generate``, vLLM's token-in, token-out route."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.http.forms import INT64, Ids
from mlx_parallm.api.turns.fields import (
    MAX_NAMED_TOKENS,
    ProcessorKwargs,
    SamplingFields,
    StreamFields,
)
from mlx_parallm.api.turns.images import ImageSource
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object
from mlx_parallm.types.request import MAX_CHOICES

# UNSUPPORTED: parameters of vLLM that would change the tokens and are not supported here.
UNSUPPORTED = (
    "bad_words",
    "logits_processors",
    "prompt_logprob_token_ids",
    "repetition_detection",
    "thinking_token_budget",
    "use_beam_search",
)
# WHOLE_IMAGES: vLLM's field for images as tensors, or as keys of its own cache.
WHOLE_IMAGES = "features"
# MAX_PARTS: of a prompt; --max-images-per-request is the operator's limit.
MAX_PARTS = 1024


class TokenSamplingParams(SamplingFields):
    """vLLM's ``SamplingParams``; without ``max_tokens`` the rest of the context may be used."""

    without_effect = frozenset(
        [
            "best_of",
            "detokenize",
            "flat_logprobs",
            "output_kind",
            "skip_clone",
            "skip_reading_prefix_cache",
            "spaces_between_special_tokens",
        ]
    )

    n: StrictInt = Field(1, ge=1, le=MAX_CHOICES, description="Samples of the prompt.")
    max_tokens: StrictInt | None = Field(
        None, ge=0, description="Most tokens to generate; default: the rest of the context."
    )
    logprobs: StrictInt | None = Field(
        None,
        ge=-1,
        description="Log-probabilities: of the sampled token, and of so many in all; -1 for all.",
    )
    prompt_logprobs: StrictInt | None = Field(
        None, ge=-1, description="Alternatives per prompt token; -1 for all."
    )
    logprob_token_ids: list[StrictInt] = Field(
        default_factory=list[int],
        max_length=MAX_NAMED_TOKENS,
        description="Report these tokens in place of the likeliest.",
    )

    def check_supported(self) -> None:
        """Refuse parameters that would change the tokens and are not supported.

        Raises:
            InvalidRequestError: such a parameter has a value.
        """
        self.refuse(*UNSUPPORTED)
        best_of = (self.model_extra or {}).get("best_of")
        if best_of is not None and best_of != self.n:
            raise InvalidRequestError(
                "best_of must equal n.", param="best_of", code="unsupported_parameter"
            )


class TokenGenerateRequest(StreamFields):
    """A prompt as token ids, used exactly as it is."""

    without_effect = frozenset(
        [
            "ec_transfer_params",
            "kv_transfer_params",
            "reasoning_ended",
            "reasoning_parser_kwargs",
            "token_offsets",
        ]
    )

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    token_ids: Ids = Field(
        min_length=1,
        description="The prompt; it has one placeholder, or all tokens, of each image.",
    )
    content_parts: list[dict[str, Any]] | None = Field(
        None,
        max_length=MAX_PARTS,
        description='Images of the prompt, in order: {"type": "image_url", "url": …}.',
    )
    mm_processor_kwargs: ProcessorKwargs = None
    sampling_params: TokenSamplingParams = Field(description="vLLM's SamplingParams.")
    model: StrictStr | None = Field(
        None, description="A served model or adapter; default: the first model."
    )
    request_id: StrictStr | None = Field(
        None, min_length=1, max_length=128, description="The answer's id; must be unique."
    )
    return_token_ids: StrictBool = Field(False, description="Add the ids of the prompt.")
    output_mode: Literal["tokens", "text"] = Field(
        "tokens", description="text adds the text, and the text of tokens."
    )
    cache_salt: StrictStr | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Share cached prefixes only with the same salt.",
    )
    priority: StrictInt = Field(0, ge=-INT64, lt=INT64, description="Lower runs first.")

    def check_supported(self) -> None:
        """Refuse fields and parameters that are not supported.

        Raises:
            InvalidRequestError: the prompt has images as tensors, or see
                ``TokenSamplingParams.check_supported``.
        """
        if (self.model_extra or {}).get(WHOLE_IMAGES):
            raise InvalidRequestError(
                f"{WHOLE_IMAGES} is not supported: it has tensors of vLLM's own processors, or "
                "keys of its cache. Send all images in content_parts; token_ids may have all "
                "tokens of those of earlier turns.",
                param=WHOLE_IMAGES,
                code="unsupported_parameter",
            )
        self.sampling_params.check_supported()

    def images(self) -> list[ImageSource]:
        """Return where the images come from, in order.

        Raises:
            InvalidRequestError: a part is no image.
        """
        parts = enumerate(self.content_parts or ())
        return [_source(part, f"content_parts[{number}]") for number, part in parts]


def _source(part: dict[str, Any], where: str) -> ImageSource:
    """Return a part's image, whose URL may also stand in an object as OpenAI's does."""
    inner = part.get("image_url")
    url = inner.get("url") if is_object(inner) else part.get("url", inner)
    if part.get("type") != "image_url" or not isinstance(url, str):
        raise InvalidRequestError(
            f'{where} must be an image: {{"type": "image_url", "url": …}}.', param=where
        )
    return ImageSource(param=where, url=url)
