"""Parameters of Hugging Face's tasks that generate, by transformers' and TGI's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.http.forms import INT64, Number, OpenForm
from mlx_parallm.api.turns.fields import MAX_STOP_CHARS, MAX_STOPS
from mlx_parallm.types.beams import MAX_BEAMS
from mlx_parallm.types.errors import InvalidRequestError

#: ``NEUTRAL``: parameters whose effect is not served, with the value that changes nothing.
NEUTRAL: Mapping[str, Any] = {
    "bad_words_ids": None,
    "best_of": 1,
    "constraints": None,
    "decoder_input_details": False,
    "diversity_penalty": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "force_words_ids": None,
    "guidance_scale": 1,
    "max_time": None,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "return_full_text": False,
    "top_n_tokens": 0,
    "watermark": False,
}
#: ``SAMPLING``: likewise, of parameters that matter to samples alone.
SAMPLING: Mapping[str, Any] = {"epsilon_cutoff": 0, "eta_cutoff": 0, "typical_p": 1}


class GenerationParameters(OpenForm):
    """Parameters of generated texts; an absent one is as the model's files say."""

    src_lang: StrictStr | None = Field(None, description="The language of the source.")
    tgt_lang: StrictStr | None = Field(None, description="The language to translate to.")
    clean_up_tokenization_spaces: StrictBool | None = Field(
        None, description="Remove spaces before punctuation and in contractions."
    )
    truncation: Literal["do_not_truncate", "longest_first", "only_first", "only_second"] | None = (
        Field(None, description="Whether sources that are too long are cut at their ends.")
    )
    max_length: StrictInt | None = Field(
        None, ge=1, description="Most tokens of an output, those before it included."
    )
    min_length: StrictInt | None = Field(
        None, ge=0, description="Least tokens of an output, those before it included."
    )
    max_new_tokens: StrictInt | None = Field(
        None, ge=1, description="Most tokens of an output, forced ones included."
    )
    min_new_tokens: StrictInt | None = Field(
        None, ge=0, description="Least tokens of an output, forced ones included."
    )
    num_beams: StrictInt | None = Field(None, ge=1, le=MAX_BEAMS, description="1: no beams.")
    num_return_sequences: StrictInt | None = Field(
        None, ge=1, le=MAX_BEAMS, description="Texts for each source."
    )
    length_penalty: Number | None = Field(
        None, description="Above 0 longer outputs score better; with beams."
    )
    early_stopping: StrictBool | Literal["never"] | None = Field(
        None, description="When a beam search ends."
    )
    no_repeat_ngram_size: StrictInt | None = Field(
        None, ge=0, description="No run of so many tokens occurs twice; 0 is off."
    )
    do_sample: StrictBool | None = Field(
        None, description="Draw tokens; by default where temperature is above 0."
    )
    temperature: Number | None = Field(None, ge=0, le=2, description="Of samples; 0 is greedy.")
    top_p: Number | None = Field(None, gt=0, le=1, description="Of samples.")
    repetition_penalty: Number | None = Field(
        None, gt=0, le=100, description="Over 1 makes tokens that were generated less likely."
    )
    frequency_penalty: Number | None = Field(
        None, ge=-2, le=2, description="Subtracted per occurrence of a token generated before."
    )
    seed: StrictInt | None = Field(None, ge=-INT64, lt=INT64, description="Fixes samples.")
    stop: StrictStr | list[StrictStr] | None = Field(
        None, description=f"Up to {MAX_STOPS} texts that end an output."
    )
    stop_sequences: list[StrictStr] | None = Field(None, description="The same.")
    grammar: dict[str, Any] | None = Field(
        None, description='TGI\'s: {"type": "json" or "regex", "value": …}.'
    )
    details: StrictBool | None = Field(
        None, description="Add the tokens of the output, with log-probabilities."
    )
    adapter_id: StrictStr | None = Field(None, description="An adapter of the model.")

    def check_supported(self) -> None:
        """Refuse parameters that would change the text in a way that is not served, by name."""
        extra = self.model_extra or {}
        # langchain sends a typical_p with every request.
        refused = {**NEUTRAL, **SAMPLING} if self.samples else NEUTRAL
        for name, neutral in refused.items():
            if name in extra and extra[name] not in (neutral, None):
                raise InvalidRequestError(
                    f"{name} is not supported.", param=name, code="unsupported_parameter"
                )
        if self.truncation == "only_second":
            raise InvalidRequestError(
                "truncation must not be only_second: a source is one text.", param="truncation"
            )

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end an output.

        Raises:
            InvalidRequestError: there are too many.
        """
        own = [self.stop] if isinstance(self.stop, str) else self.stop or []
        stops = (*own, *(self.stop_sequences or []))
        if len(stops) > MAX_STOPS:
            raise InvalidRequestError(f"At most {MAX_STOPS} texts may end an output.", param="stop")
        if sum(map(len, stops)) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"Texts that end an output have at most {MAX_STOP_CHARS} characters together.",
                param="stop",
            )
        return stops

    @property
    def samples(self) -> bool:
        """True if tokens are drawn."""
        return bool(self.temperature) if self.do_sample is None else self.do_sample
