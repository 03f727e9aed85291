"""Immutable requests to models that generate, and the versions of weights that they run with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mlx_parallm.types.beams import BeamParams
from mlx_parallm.types.content import PendingContent, kv_content
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.grammar import Grammar, StructuredOutputsParams
from mlx_parallm.types.model_input import ModelInput, num_source_tokens
from mlx_parallm.types.work import EVERYBODY, CacheScope, RequestWork

#: ``DEFAULT_VERSION`` is the label of the weights loaded at start, as in vLLM and SGLang.
DEFAULT_VERSION = "default"
#: What a sleeping model has freed, by vLLM's names.
WEIGHTS, KV_CACHE = "weights", "kv_cache"
SLEEP_TAGS = (WEIGHTS, KV_CACHE)
#: The level of sleep from which weights are read again from the folder.
DROPS_WEIGHTS = 2


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """A state of a base model or of an adapter.

    Attributes:
        content: an id of what it computes, such as a digest of the tensors; empty for a base model
            as it was loaded.
        label: its name for clients; every token computed with it carries the label.
        is_cached: False if no KV computed with it may be found again, as with weights that change
            at every step.
        is_lasting: True if an adapter's content is a digest, which means the same in every process.
    """

    content: str = ""
    label: str = DEFAULT_VERSION
    is_cached: bool = True
    is_lasting: bool = False


@dataclass(slots=True, eq=False)
class BaseWeights:
    """The current weights of a loaded model; an update replaces them between two steps.

    Attributes:
        version: their version.
        lasting: their lasting content, which may become known later than the version is in use.
        identity: the digest of what else decides their KV, see ``Identity``; None if unknown.
    """

    version: WeightsVersion = field(default_factory=WeightsVersion)
    lasting: PendingContent = field(default_factory=PendingContent)
    identity: str | None = None


@dataclass(slots=True, eq=False)
class PolicyWeights:
    """The current weights of one served name; all requests of the name share this object.

    An update changes it between two steps; running requests continue with the new weights.

    Attributes:
        base: the model's weights.
        adapter: the adapter's version; None for the model itself.
    """

    base: BaseWeights = field(default_factory=BaseWeights)
    adapter: WeightsVersion | None = None

    @property
    def label(self) -> str:
        """The version label of the tokens computed now."""
        return (self.adapter or self.base.version).label

    @property
    def is_cached(self) -> bool:
        """False if no KV computed now may be found by another request."""
        return self.base.version.is_cached and (self.adapter is None or self.adapter.is_cached)

    @property
    def content(self) -> str:
        """KV cache key: equal iff both compute identical KV."""
        adapter = "" if self.adapter is None else self.adapter.content
        return f"{self.base.version.content}/{adapter}"

    @property
    def lasting_content(self) -> str | None:
        """Return ``content`` as every process has it, for KV that outlives this one.

        None while it is not known, and for weights of which no process has a digest: their KV must
        be neither written anywhere nor read.
        """
        base, adapter = self.base, self.adapter
        digest = base.lasting.digest
        if not self.is_cached or digest is None or base.identity is None:
            return None
        if adapter is None:
            return kv_content(base.identity, digest, "")
        return kv_content(base.identity, digest, adapter.content) if adapter.is_lasting else None


# BACKGROUND_PRIORITY: above every 64-bit number, and so behind every request of a client.
BACKGROUND_PRIORITY = 2**64
MAX_CHOICES = 128
#: ``INPUT_TOKEN`` stands in ``prompt_ids`` where a row of an input is; it is never looked up.
INPUT_TOKEN = 0
#: ``ALL_TOKENS`` as ``logprobs`` or ``prompt_logprobs`` means the whole vocabulary, as in vLLM.
ALL_TOKENS = -1

RAW_LOGPROBS = "raw_logprobs"
PROCESSED_LOGPROBS = "processed_logprobs"
LOGPROBS_MODES = (RAW_LOGPROBS, PROCESSED_LOGPROBS)
#: ``ADJUSTED_LOGPROBS``: log-probabilities after masks, biases and penalties, not normalised again.
ADJUSTED_LOGPROBS = "adjusted_logprobs"
#: ``RENORMALIZED_LOGPROBS``: likewise, normalised again: ``renormalize_logits`` of transformers.
RENORMALIZED_LOGPROBS = "renormalized_logprobs"
#: ``BEAM_MODES``: the modes that requests cannot name.
BEAM_MODES = (ADJUSTED_LOGPROBS, RENORMALIZED_LOGPROBS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """A limit on the reasoning of a sample.

    Attributes:
        tokens: most tokens of reasoning; then ``end_id`` is forced.
        end_id: the token that ends the reasoning.
        start_id: the token that begins it; None if only the prompt can begin it.
        is_open: True if the prompt ends inside the reasoning.
    """

    tokens: int
    end_id: int
    start_id: int | None = None
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimestampRule:
    """The grammar of a speech model's timestamps (arXiv:2212.04356, section 2.3).

    They come in pairs, an end and a beginning, and never go back.

    Attributes:
        begin_id: the token of the timestamp 0; all later ones are timestamps.
        end_id: the end token; all tokens before it are text.
        off_id: the token that a prompt without timestamps ends with.
        max_initial: most steps of the first timestamp.
    """

    begin_id: int
    end_id: int
    off_id: int
    max_initial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request. Names and meanings are vLLM's.

    Attributes:
        n: independent samples of the same prompt, 1 to 128; sample i uses ``seed + i``. With
            ``beams``: how many of the best hypotheses are returned.
        temperature: 0 is greedy; logits are divided by it otherwise.
        top_p: nucleus mass, in (0, 1].
        top_k: keep the k likeliest tokens; 0 and -1 keep all.
        min_p: keep tokens at least this share as likely as the likeliest, in [0, 1].
        top_n_sigma: keep tokens whose logit is at most so many standard deviations of the row's
            logits below the largest (top-nsigma, arXiv:2411.07641); 0 is off.
        presence_penalty: subtracted once from the logit of every token already generated.
        frequency_penalty: subtracted once per occurrence among the generated tokens.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in
            the prompt or the output (CTRL, arXiv:1909.05858); 1 is off.
        logit_bias: ``(token id, bias)`` pairs added to the logits.
        allowed_token_ids: when given, only these tokens can be sampled.
        seed: fixes the sampled tokens, whatever else is in the batch, unless a truncation
            cuts between logits that differ only by rounding (docs/logprobs.md); None draws one.
        max_tokens: most tokens to generate; None means up to the context length; 0 scores only.
        min_tokens: before this many tokens, neither end-of-sequence nor a stop token is sampled,
            and stop strings are not looked for.
        stop: strings that end generation; removed from the text unless
            ``include_stop_str_in_output``.
        stop_regex: regular expressions whose first match ends generation, treated as ``stop``.
        include_stop_str_in_output: keep the stop string that ended the text.
        stop_token_ids: tokens that end generation, besides the model's own.
        ignore_eos: go on past the model's end-of-sequence tokens.
        skip_special_tokens: leave special tokens out of the text.
        shown_token_ids: special tokens that stay in the text all the same: a parser's markers.
        hidden_token_ids: further tokens that are left out of the text.
        logprobs: None for none; k for the sampled token's log-probability and the k likeliest;
            -1 for all.
        logprobs_mode: whose log-probabilities ``logprobs`` and ``entropy`` are.
            "raw_logprobs": the model's, before temperature, penalties, biases and masks.
            "processed_logprobs": those of the distribution the token was drawn from, after all of
            these and truncation. A greedy row counts as temperature 1 without
            truncation. None takes the engine's mode.
        logprob_token_ids: with ``logprobs``: report these tokens, in this order, in place of the
            likeliest.
        entropy: report the entropy of that distribution for each token; implies ``logprobs`` of 0
            at least. With ``prompt_logprobs`` also that of the model for each prompt token.
        values: report what the value head says of the state that each token was chosen in; implies
            ``logprobs`` of 0 at least. With ``prompt_logprobs`` also for each prompt token.
        prompt_logprobs: as ``logprobs``, for each prompt token given those before it; the model's
            in both modes.
        prompt_logprobs_start: the first prompt token that is scored; those before it have None,
            and may come from the prefix cache.
        speculative: allow speculative decoding if the engine has it; the sampled tokens do not
            depend on it.
        grammar: only tokens that can still lead to a match are sampled, and the end-of-sequence
            only after a match; None: any text.
        structured_outputs: ``LLM`` makes the ``grammar`` of it, and takes one of the two.
        thinking_budget: the limit on reasoning, which also turns speculation off; None: no limit.
        beams: beam search in place of samples; None: samples.
        no_repeat_ngram_size: no token is chosen that would repeat a run of so many tokens of prompt
            and output; 0 is off.
        forced_eos_id: the token that is chosen last if a sample gets as long as it may be; None:
            any.
        begin_banned_ids: tokens that a sample does not begin with.
        timestamps: the rule of its timestamps; None for text without any.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_token_ids: tuple[int, ...] = ()
    hidden_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logprobs_mode: str | None = None
    logprob_token_ids: tuple[int, ...] = ()
    entropy: bool = False
    values: bool = False
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    speculative: bool = True
    grammar: Grammar | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_budget: ThinkingBudget | None = None
    beams: BeamParams | None = None
    no_repeat_ngram_size: int = 0
    forced_eos_id: int | None = None
    begin_banned_ids: tuple[int, ...] = ()
    timestamps: TimestampRule | None = None

    def __post_init__(self) -> None:
        self._check_range("n", self.n, 1, MAX_CHOICES)
        self._check_range("temperature", self.temperature, 0, 100)
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError("top_p must be in (0, 1].", param="top_p")
        if self.top_k < -1:
            raise InvalidRequestError("top_k must be -1, 0 or positive.", param="top_k")
        self._check_range("min_p", self.min_p, 0, 1)
        if not 0 <= self.top_n_sigma < math.inf:
            raise InvalidRequestError(
                "top_n_sigma must be finite and not negative.", param="top_n_sigma"
            )
        self._check_range("presence_penalty", self.presence_penalty, -2, 2)
        self._check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        if not 0 < self.repetition_penalty <= 100:
            raise InvalidRequestError(
                "repetition_penalty must be in (0, 100].", param="repetition_penalty"
            )
        self._check_logprobs()
        for name in ("max_tokens", "min_tokens", "prompt_logprobs_start", "no_repeat_ngram_size"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidRequestError(f"{name} must not be negative.", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens must not exceed max_tokens.", param="min_tokens")
        if self.grammar is not None and self.structured_outputs is not None:
            raise InvalidRequestError(
                "structured_outputs and grammar exclude each other.", param="structured_outputs"
            )
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop must not contain an empty string.", param="stop")
        self._check_beams()

    def _check_beams(self) -> None:
        if self.beams is None:
            return
        if self.n > self.beams.width:
            raise InvalidRequestError(
                f"n is {self.n}, and {self.beams.width} beams have no more results.", param="n"
            )
        structure = "structured_outputs" if self.grammar is None else self.grammar.param
        without = {
            "temperature": self.temperature == 0,
            "top_p": self.top_p == 1,
            "top_k": self.top_k <= 0,
            "min_p": self.min_p == 0,
            "top_n_sigma": self.top_n_sigma == 0,
            "stop": not self.stop,
            "stop_regex": not self.stop_regex,
            structure: self.grammar is None and self.structured_outputs is None,
            "timestamps": self.timestamps is None,
            "thinking_token_budget": self.thinking_budget is None,
            "logprob_token_ids": not self.logprob_token_ids,
            "logprobs_mode": self.logprobs_mode is None,
            "entropy": not self.entropy,
            "values": not self.values,
            "max_tokens": self.max_tokens != 0,
        }
        for name, is_unset in without.items():
            if not is_unset:
                raise InvalidRequestError(
                    f"This {name} cannot be combined with beam search.", param=name
                )

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value < ALL_TOKENS:
                raise InvalidRequestError(f"{name} must be -1, 0 or positive.", param=name)
        if self.logprobs_mode not in (None, *BEAM_MODES, *LOGPROBS_MODES):
            modes = " or ".join(LOGPROBS_MODES)
            raise InvalidRequestError(f"logprobs_mode must be {modes}.", param="logprobs_mode")

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens reported per token; None for no log-probabilities."""
        return 0 if self.logprobs is None and (self.entropy or self.values) else self.logprobs

    @property
    def num_sequences(self) -> int:
        """Number of sequences that run: samples or beams."""
        return self.n if self.beams is None else self.beams.width

    @property
    def has_penalty(self) -> bool:
        """True if a penalty makes the sampler read the tokens so far."""
        is_added = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return is_added or self.repetition_penalty != 1.0

    @staticmethod
    def _check_range(name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:  # also refuses NaN
            raise InvalidRequestError(f"{name} must be between {low} and {high}.", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A prompt to be continued ``params.n`` times.

    Attributes:
        request_id: unique among the requests in flight.
        model: a name the server knows the model by.
        adapter: the name of an adapter of the model; None for the model itself.
        prompt_ids: the prompt's tokens; never empty. ``INPUT_TOKEN`` at the rows of an input.
        turn_start: the index into ``prompt_ids`` where the latest turn of the user begins, or what
            else will be another in the next prompt; None if unknown. It is a hint.
        answer_start: how many of ``prompt_ids`` the next prompt begins with once this one is
            answered; None if unknown. It is a hint.
        inputs: inputs besides tokens; their spans do not overlap.
        params: how tokens are chosen.
        priority: lower runs first, as in vLLM.
        client: a digest of the API key; admission takes turns between clients.
        cache_salt: requests of different salts never share prefix-cache blocks.
        extra_key: SGLang's field; requests share such blocks only if salt and extra key are equal.
        rank: the number of the engine that the client chose; None if it chose none.
        scope: whose requests may reuse its blocks; set when the request enters the server.
        group: the id that the client knows, if several requests make one answer.
        is_local: True if no other server may compute its prompt.
    """

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    rank: int | None = None
    client: str = ""
    cache_salt: str | None = None
    extra_key: str | None = None
    scope: CacheScope = EVERYBODY
    adapter: str | None = None
    group: str | None = None
    inputs: tuple[ModelInput, ...] = ()
    turn_start: int | None = None
    answer_start: int | None = None
    is_local: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt and of sources; see ``Request``."""
        return len(self.prompt_ids) + num_source_tokens(self.inputs)

    def entering(
        self, scope: CacheScope, rank: int | None, *, is_background: bool
    ) -> GenerateRequest:
        """Return the request as it enters a server; see ``Request``."""
        last = BACKGROUND_PRIORITY if is_background else 0
        own_rank = rank if self.rank is None else self.rank
        return replace(self, scope=scope, rank=own_rank, priority=last + self.priority)

    def work(self) -> RequestWork:
        """Return what the request asks of an engine."""
        # An input that costs something is computed besides its rows, unless it is kept.
        costly = [
            (each, (hash((each.kind, each.content)),) * each.cost)
            for each in self.inputs
            if each.cost
        ]
        # The KV of a source is kept as that of tokens is, but no prompt continues a part of it.
        sources = [token for each, tokens in costly if each.num_kv_tokens for token in tokens]
        return RequestWork(
            num_tokens=len(self.prompt_ids) + sum(len(tokens) for _, tokens in costly),
            num_samples=self.params.num_sequences,
            max_output=self.params.max_tokens,
            prefix=[*sources, *self._meanings()] if sources else self._meanings(),
            num_whole=len(sources),
            turn_start=self.turn_start,
            answer_start=self.answer_start,
            model=self.model,
            inputs=[tokens for each, tokens in costly if not each.num_kv_tokens],
            cache_key=(
                *(self.model, self.adapter, self.scope, self.cache_salt, self.extra_key),
                *(each.content for each in self.inputs if each.span is None),
            ),
            client=self.client,
            line=(self.model, self.adapter, self.priority, self.client),
            is_divisible=self._is_divisible,
            rank=self.rank,
        )

    @property
    def _is_divisible(self) -> bool:
        """True if engines may share the samples.

        Without samples there is nothing to divide, inputs are computed for one engine, and beams
        compete with each other.
        """
        params = self.params
        has_samples = params.n > 1 and params.max_tokens != 0
        return has_samples and params.beams is None and not self.inputs

    def _meanings(self) -> Sequence[int]:
        """Return the prompt's tokens, with a number of its content where an input begins."""
        if not self.inputs:
            return self.prompt_ids
        meanings = list(self.prompt_ids)
        for each in self.inputs:
            if each.span is not None:
                meanings[each.span.start] = hash((each.kind, each.content))
        return meanings

    @property
    def reports_prompt(self) -> bool:
        """True if the event of the prompt has more than counts in it."""
        return self.params.prompt_logprobs is not None

    def with_seed(self, draw: Callable[[], int]) -> GenerateRequest:
        """Return it with a seed, which ``draw`` returns unless the request has one."""
        if self.params.seed is not None:
            return self
        return replace(self, params=replace(self.params, seed=draw()))

    def part(self, request_id: str, places: Sequence[int]) -> GenerateRequest:
        """Return a request for the samples of these indices, without gaps.

        The request must have a seed, of which every sample keeps its own. Only the part with the
        first sample scores the prompt.
        """
        assert self.params.seed is not None
        params = replace(
            self.params,
            n=len(places),
            seed=self.params.seed + places[0],
            prompt_logprobs=self.params.prompt_logprobs if places[0] == 0 else None,
        )
        return replace(self, request_id=request_id, params=params)
