"""The fields that bodies of generating routes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from mlx_parallm.api.http.forms import INT64, MAX_BIASES, NullIsAbsent, Number, VocabularyIds
from mlx_parallm.api.http.keep_alive import KeepAliveFields
from mlx_parallm.types.beams import MAX_BEAMS, BeamParams
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_mapping, is_sequence
from mlx_parallm.types.request import ALL_TOKENS, MAX_CHOICES, SamplingParams


@dataclass(frozen=True, slots=True)
class BodyValue:
    """A JSON value and its place in the body, which refusals name.

    Attributes:
        value: as it came; None where there is none.
        where: its place, as ``tools[3].function``.
    """

    value: Any
    where: str

    def __getitem__(self, key: str) -> BodyValue:
        """Return a value of an object."""
        value = self.value.get(key) if is_mapping(self.value) else None
        return BodyValue(value, f"{self.where}.{key}")

    @property
    def type(self) -> Any:
        """The type of an object; it may be anything."""
        return self["type"].value

    def object(self) -> BodyValue:
        """Return the value, which must be an object."""
        if not isinstance(self.value, Mapping):
            raise self.refusal("must be an object")
        return self

    def entries(self, *, form: str = "{where}[{number}]", what: str = "") -> list[BodyValue]:
        """Return the entries of a list, each placed by ``form``; ``what`` is said of another value.

        Raises:
            InvalidRequestError: it is no list.
        """
        if not is_sequence(self.value):
            raise self.refusal(what or "must be a list")
        return [
            BodyValue(value, form.format(where=self.where, number=number))
            for number, value in enumerate(self.value)
        ]

    def text(self) -> str:
        """Return the value, which must be a text."""
        if not isinstance(self.value, str):
            raise self.refusal("must be a text")
        return self.value

    def filled_text(self) -> str:
        """Return the value, which must be a text that is not empty."""
        if not isinstance(self.value, str) or not self.value:
            raise self.refusal("must be a text that is not empty")
        return self.value

    def optional_text(self) -> str | None:
        """Return the value, which must be a text or absent."""
        return None if self.value is None else self.text()

    def flag(self) -> bool:
        """Return the value, which must be true, false or absent, which is false."""
        if not isinstance(self.value, bool | None):
            raise self.refusal("must be true or false")
        return bool(self.value)

    def refusal(self, why: str, *, unsupported: bool = False) -> InvalidRequestError:
        """Return the error that names the place and says why; the caller raises it."""
        code = "unsupported_parameter" if unsupported else None
        return InvalidRequestError(f"{self.where} {why}.", param=self.where, code=code)


# MAX_STOP_CHARS: of all stop strings; the engine's thread reads each when the request comes.
MAX_STOP_CHARS = 65_536
# PARAMETERS that bodies have by the same names. Structures become an engine's grammar.
PARAMETERS = frozenset(SamplingParams.__dataclass_fields__) - {"grammar", "structured_outputs"}


def sampling_params(body: SamplingFields, *, max_logprobs: int, **changes: Any) -> SamplingParams:
    """Return the engine's parameters of a body, whose fields are taken by their names.

    Args:
        body: as it came.
        max_logprobs: most log-probabilities per token; -1 is no limit.
        changes: parameters that the body has in another form, or not at all.

    Raises:
        InvalidRequestError: a value is out of range, or more log-probabilities are asked for than
            the server allows.
    """
    names = PARAMETERS & type(body).model_fields.keys()
    values = {name: _immutable(getattr(body, name)) for name in names}
    values |= {"logit_bias": body.biases(), "stop": body.stops()}
    values |= {"stop_regex": body.stop_expressions()} | changes
    if sum(map(len, values["stop"])) > MAX_STOP_CHARS:
        raise InvalidRequestError(
            f"Stop strings have at most {MAX_STOP_CHARS} characters together.", param="stop"
        )
    for name in ("logprobs", "prompt_logprobs"):
        count = values.get(name)
        if count is None or max_logprobs == ALL_TOKENS:
            continue
        if count > max_logprobs or count == ALL_TOKENS:
            name = "top_logprobs" if name == "logprobs" and hasattr(body, "top_logprobs") else name
            raise InvalidRequestError(f"{name} is at most {max_logprobs} here.", param=name)
    return SamplingParams(**values)


def _immutable(value: Any) -> Any:
    return tuple(value) if is_list(value) else value


MAX_STOPS = 64
MAX_NAMED_TOKENS = 1024
MAX_TEMPLATE_KWARGS = 1024
# Python refuses to read integers of thousands of digits.
MAX_ID_DIGITS = 18

# What a body without a model means.
ANY_GENERATOR = "A served model's name; default: the first that generates."

# Accepted for compatibility; they change nothing here.
WITHOUT_EFFECT = frozenset(
    [
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
        "verbosity",
        "prediction",
        "web_search_options",
        "moderation",
        "client_metadata",
        "spaces_between_special_tokens",
        "best_of",
        "detokenize",
        "nvext",
        "session_id",
        "vllm_xargs",
    ]
)


# Arguments of the rendering itself, the template above all.
RESERVED_KWARGS = frozenset(
    [
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    ]
)


def _check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    reserved = sorted(RESERVED_KWARGS & set(kwargs))
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs may not have {', '.join(reserved)}.",
            param="chat_template_kwargs",
        )
    return kwargs


TemplateKwargs = Annotated[
    dict[str, Any],
    AfterValidator(_check_template_kwargs),
    Field(
        default_factory=dict,
        max_length=MAX_TEMPLATE_KWARGS,
        description="Further variables for the template.",
    ),
]


ProcessorKwargs = Annotated[
    dict[str, Any] | None,
    Field(
        description="How images are resized: min_pixels and max_pixels, for models that take "
        "images of any size.",
    ),
]


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """Return the template's variables for an effort; "none" turns thinking off."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


class StreamOptions(NullIsAbsent):
    """Options of a stream."""

    without_effect = frozenset({"include_obfuscation"})

    model_config = ConfigDict(extra="ignore")

    include_usage: StrictBool = Field(False, description="End with a chunk of token counts.")
    continuous_usage_stats: StrictBool = Field(
        False, description="Token counts in every chunk; none where include_usage is false."
    )

    @property
    def tells_usage_so_far(self) -> bool:
        """True if every chunk has token counts; an explicit ``include_usage: false`` wins."""
        is_off = "include_usage" in self.model_fields_set and not self.include_usage
        return self.continuous_usage_stats and not is_off


class StreamFields(NullIsAbsent):
    """Fields that ask for a stream, and for what it carries."""

    stream: StrictBool = Field(False, description="Answer by server-sent events.")
    stream_options: StreamOptions | None = Field(
        None, description="What else a stream carries; 400 without stream."
    )

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options needs stream to be true.", param="stream_options"
            )
        return self


class TurnEndFields(NullIsAbsent):
    """End of a templated conversation: an open turn, or the last message, to be continued."""

    add_generation_prompt: StrictBool = Field(
        True, description="Open the assistant's turn; not with continue_final_message."
    )
    continue_final_message: StrictBool = Field(
        False, description="Go on with the last message instead of opening a turn."
    )

    @model_validator(mode="after")
    def _check_turn_end(self) -> Self:
        # The default of add_generation_prompt gives way; only a body that says both is refused.
        opens = "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt
        if opens and self.continue_final_message:
            raise InvalidRequestError(
                "continue_final_message goes without add_generation_prompt.",
                param="continue_final_message",
            )
        return self


class ThinkingFields(NullIsAbsent):
    """Limits of a model's thinking."""

    thinking_token_budget: StrictInt | None = Field(
        None, ge=-1, le=INT64 - 1, description="Most tokens of reasoning; -1 is no limit."
    )

    def thinking_budget(self) -> int | None:
        """Return the most tokens of reasoning; None for no limit."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget


class QueueFields(NullIsAbsent):
    """Where a request stands in the queue, and with whom it shares cached prefixes."""

    priority: StrictInt = Field(0, ge=-INT64, lt=INT64, description="Lower runs first.")
    cache_salt: StrictStr | None = Field(
        None, max_length=1024, description="Share cached prefixes only with the same salt."
    )


class SamplingFields(NullIsAbsent):
    """Sampling settings; names are OpenAI's, vLLM's and SGLang's."""

    without_effect = WITHOUT_EFFECT

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    temperature: Number = Field(1.0, ge=0, le=2, description="0 is greedy.")
    top_p: Number = Field(1.0, gt=0, le=1, description="Keep the likeliest of this mass.")
    top_k: StrictInt = Field(0, ge=-1, description="0 and -1 keep all tokens.")
    min_p: Number = Field(
        0.0, ge=0, le=1, description="Keep tokens at least this share as likely as the likeliest."
    )
    top_n_sigma: Number = Field(
        0.0, ge=0, description="Keep logits at most so many standard deviations below the largest."
    )
    presence_penalty: Number = Field(
        0.0, ge=-2, le=2, description="Subtracted once from tokens generated before."
    )
    frequency_penalty: Number = Field(
        0.0, ge=-2, le=2, description="Subtracted per occurrence of a token generated before."
    )
    repetition_penalty: Number = Field(
        1.0, gt=0, le=100, description="Over 1 makes tokens of prompt and output less likely."
    )
    logit_bias: dict[str, Number] | None = Field(
        None, max_length=MAX_BIASES, description="Bias by token id."
    )
    allowed_token_ids: VocabularyIds | None = Field(
        None, description="Only these tokens can be sampled."
    )
    seed: StrictInt | None = Field(
        None, ge=-INT64, lt=INT64, description="Fixes the samples; sample i uses seed + i."
    )
    stop: StrictStr | list[StrictStr] | None = Field(
        None, description=f"Up to {MAX_STOPS} texts that end a sample."
    )
    stop_regex: StrictStr | list[StrictStr] | None = Field(
        None, description="SGLang's: expressions whose first match ends a sample, as stop does."
    )
    stop_token_ids: VocabularyIds = Field(
        default_factory=list[int], description="Tokens that end a sample, besides the model's own."
    )
    include_stop_str_in_output: StrictBool = Field(
        False, description="Leave the stop text in the answer."
    )
    ignore_eos: StrictBool = Field(False, description="Go on past the end of sequence.")
    min_tokens: StrictInt = Field(0, ge=0, description="No end before this many tokens.")
    skip_special_tokens: StrictBool = Field(True, description="Leave special tokens out.")
    structured_outputs: Any = Field(
        None,
        description="vLLM's: one of json, regex, choice, grammar, json_object, structural_tag.",
    )
    guided_json: Any = Field(None, description="The same as structured_outputs.json.")
    guided_regex: Any = Field(None, description="The same as structured_outputs.regex.")
    guided_choice: Any = Field(None, description="The same as structured_outputs.choice.")
    guided_grammar: Any = Field(None, description="The same as structured_outputs.grammar.")
    regex: Any = Field(None, description="The same, as SGLang names it.")
    ebnf: Any = Field(None, description="A GBNF grammar, as SGLang names it.")
    json_schema: Any = Field(None, description="A JSON schema, as SGLang names it.")
    grammar: Any = Field(None, description="A GBNF grammar, as llama.cpp names it.")
    speculative: StrictBool = Field(
        True, description="False keeps speculative decoding away from this request."
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = Field(
        None, description="Which log-probabilities to return; default: the server's mode."
    )

    def stops(self) -> tuple[str, ...]:
        """Return the stop strings; raise InvalidRequestError if there are too many."""
        return self._few_texts("stop")

    def stop_expressions(self) -> tuple[str, ...]:
        """Return the expressions that end a sample; raise as ``stops`` does."""
        return self._few_texts("stop_regex")

    def _few_texts(self, name: str) -> tuple[str, ...]:
        value = getattr(self, name)
        texts = (value,) if isinstance(value, str) else tuple(value or ())
        if len(texts) > MAX_STOPS:
            raise InvalidRequestError(f"{name} has at most {MAX_STOPS} texts.", param=name)
        return texts

    def biases(self) -> tuple[tuple[int, float], ...]:
        """Return the biases by token id.

        Raises:
            InvalidRequestError: a key is no token id, or a bias is outside -100 to 100.
        """
        pairs: list[tuple[int, float]] = []
        for key, bias in (self.logit_bias or {}).items():
            if not key.isascii() or not key.isdigit() or len(key) > MAX_ID_DIGITS:
                raise InvalidRequestError(f"{key[:32]!r} is not a token id.", param="logit_bias")
            if not -100 <= bias <= 100:
                raise InvalidRequestError("A bias is from -100 to 100.", param="logit_bias")
            pairs.append((int(key), bias))
        return tuple(pairs)

    def refuse(self, *names: str) -> None:
        """Raise InvalidRequestError if one of these fields, which are not offered, has a value."""
        for name in names:
            if (self.model_extra or {}).get(name):
                raise InvalidRequestError(
                    f"{name} is not supported.", param=name, code="unsupported_parameter"
                )


class SamplingRequest(KeepAliveFields, QueueFields, SamplingFields):
    """A request for samples of one model, whose tokens are chosen as ``SamplingFields`` say."""

    truncate_prompt_tokens: StrictInt | None = Field(
        None, ge=-1, description="Cut prompts to so many tokens; -1 to what max_tokens leave."
    )
    truncation_side: Literal["left", "right"] = Field(
        "left", description="The end of a prompt at which it is cut; left keeps its last tokens."
    )

    model: StrictStr | None = Field(None, description=ANY_GENERATOR)
    stream: StrictBool = Field(False, description="Answer by server-sent events.")
    user: StrictStr | None = Field(None, description="Accepted and ignored.")


class GenerationRequest(StreamFields, SamplingRequest):
    """The fields that chat and completion requests share."""

    n: StrictInt = Field(1, ge=1, le=MAX_CHOICES, description="Samples per prompt.")
    prompt_logprobs: StrictInt | None = Field(
        None, ge=-1, description="Alternatives per prompt token, in vLLM's shape; -1 for all."
    )
    logprob_token_ids: list[StrictInt] = Field(
        default_factory=list[int],
        max_length=MAX_NAMED_TOKENS,
        description="Return the log-probabilities of these tokens in place of the likeliest.",
    )
    response_format: Any = Field(
        None,
        description='{"type": "json_schema", "json_schema": {"name": …, "schema": {…}, '
        '"strict": true}}, {"type": "json_object"} or {"type": "text"}.',
    )
    return_token_ids: StrictBool = Field(
        False, description="Add the ids of prompt and output tokens."
    )
    return_tokens_as_token_ids: StrictBool = Field(
        False, description="Write the tokens of log-probabilities as token_id:N."
    )
    return_weight_versions: StrictBool = Field(
        False, description="Add which weights made which tokens."
    )
    request_id: StrictStr | None = Field(
        None, min_length=1, max_length=128, description="Part of the answer's id; must be unique."
    )
    use_beam_search: StrictBool = Field(
        False, description="Search n beams, at most 64, and return them, best first."
    )
    length_penalty: Number = Field(
        1.0, description="With beams: above 0 longer answers score better; -10 to 10."
    )
    early_stopping: StrictBool | Literal["never"] = Field(
        False,
        description='With beams: true ends the search with n finished ones, "never" once nothing '
        "can score better.",
    )
    no_repeat_ngram_size: StrictInt = Field(
        0, ge=0, description="No run of so many tokens of prompt and answer comes twice; 0 is off."
    )

    def beam_values(self) -> dict[str, Any]:
        """Return the engine's parameters of a beam search; empty without one.

        Raises:
            InvalidRequestError: it is streamed, or a field needs or excludes it.
        """
        if not self.use_beam_search:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise InvalidRequestError(f"{name} needs use_beam_search.", param=name)
            return {}
        if self.stream:
            raise InvalidRequestError("Beam search cannot be streamed.", param="stream")
        if self.n > MAX_BEAMS:
            raise InvalidRequestError(f"Beam search has 1 to {MAX_BEAMS} beams.", param="n")
        beams = BeamParams(
            width=self.n, length_penalty=self.length_penalty, early_stopping=self.early_stopping
        )
        # Other fields default to what samples have.
        is_hot = "temperature" in self.model_fields_set
        return {"beams": beams, "temperature": self.temperature if is_hot else 0.0}


# Parameters of vLLM that would change the tokens.
UNSUPPORTED = ("bad_words", "prompt_embeds")
