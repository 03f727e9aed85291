"""Request and result types of pooling models (embeddings, classification, masked LM).

A model reads an input once; a head turns its hidden states into the result of the input's task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from mlx_parallm.types.work import EVERYBODY, CacheScope, Ends, RequestWork

if TYPE_CHECKING:
    import numpy as np

#: ``Task`` names the result of an input of L tokens, always float32:
#: ``embed``: its vector, ``[dims]``, not normalised;
#: ``token_embed``: a vector for each token, ``[L, token_dims]``;
#: ``classify``: logits of the labels, ``[labels]``;
#: ``token_classify``: logits of each token's labels, ``[L, labels]``;
#: ``mlm``: logits of the masked LM at ``places``, ``[places, candidates or vocabulary]``;
#: ``mlm_logprobs``: log-probabilities at ``places``, normalised over the whole vocabulary;
#: ``mlm_top``: the ids of the ``top_k`` likeliest tokens at ``places`` and their log-probabilities,
#: ``[places, 2, top_k]``, likeliest first;
#: ``sparse``: a weight for each word of the vocabulary, ``[vocabulary]``, most of them 0.
Task = Literal[
    "embed",
    "token_embed",
    "classify",
    "token_classify",
    "mlm",
    "mlm_logprobs",
    "mlm_top",
    "sparse",
]

#: ``LABEL_TASKS`` are the tasks whose results are logits of labels.
LABEL_TASKS: frozenset[Task] = frozenset({"classify", "token_classify"})

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One text of a request. Equal inputs have equal results.

    Attributes:
        token_ids: the tokens, special ones included; at least one.
        task: which result is computed.
        second_at: index of the first token of a second text (token type 1); None: there is no
            second text, or the model has no token types.
        places: for masked-LM tasks: indices, from 0, of the tokens whose logits are wanted.
        top_k: for ``mlm_top``: number of tokens wanted, at most the vocabulary size.
        candidates: for ``mlm`` and ``mlm_logprobs``: ids whose logits are wanted, in this order;
            empty: the whole vocabulary.
        num_unattended: tokens at the end that attend to all before them, but that no token attends
            to.
        num_unpooled: for ``embed``: tokens at the beginning that are left out of the vector.
        adapter: content id of the adapter to apply; None: the base model.
        scope: whose requests may reuse the result; the engine copies it from the request.
        is_cached: False if the result is not kept for later requests, as with adapters that change
            at every step.
    """

    token_ids: tuple[int, ...]
    task: Task = "embed"
    second_at: int | None = None
    places: tuple[int, ...] = ()
    candidates: tuple[int, ...] = ()
    num_unattended: int = 0
    num_unpooled: int = 0
    top_k: int = 0
    adapter: str | None = None
    scope: CacheScope = EVERYBODY
    is_cached: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """A token of an input, and its place in the text.

    Attributes:
        token_id: its id.
        token: its text in the vocabulary; for an unknown token, the characters of the input.
        start: index of its first character.
        end: index after its last character.
        is_special: True if the tokenizer added it around the text.
        continues: True if it belongs to the same word as the token before it.
    """

    token_id: int
    token: str
    start: int
    end: int
    is_special: bool
    continues: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """Inputs of one model that are answered together.

    Attributes:
        request_id: chosen by the caller, unique among those in flight.
        model: the model's first name.
        inputs: at least one.
        adapter: name of the adapter to apply; None: the base model.
        head: the adapter's own head when the inputs were made; it decides the results' shapes.
        scope: whose requests may reuse these results; set when the request enters the server.
        rank: the number of the engine that the client chose; None if it chose none.
    """

    request_id: str
    model: str
    inputs: tuple[PoolingInput, ...]
    adapter: str | None = None
    head: OwnHead | None = None
    scope: CacheScope = EVERYBODY
    rank: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all inputs; see ``Request``."""
        return sum(len(each.token_ids) for each in self.inputs)

    def entering(self, scope: CacheScope, rank: int | None, *, is_background: bool) -> PoolRequest:
        """Return the request as it enters a server; see ``Request``."""
        del is_background
        return replace(self, scope=scope, rank=rank)

    def work(self) -> RequestWork:
        """Return what the request asks of an engine."""
        return RequestWork(
            num_tokens=self.num_prompt_tokens,
            inputs=[each.token_ids for each in self.inputs],
            cache_key=(self.model, self.adapter, self.scope),
            rank=self.rank,
            is_divisible=len(self.inputs) > 1,
        )

    def part(self, request_id: str, places: Sequence[int]) -> PoolRequest:
        """Return a request for the inputs of these indices."""
        return replace(
            self, request_id=request_id, inputs=tuple(self.inputs[place] for place in places)
        )

    def joined(self, answers: Sequence[tuple[Sequence[int], PoolingEvent]]) -> PoolingEvent:
        """Return the answer to all inputs, for the indices and the answer of each part."""
        rows = {
            place: row
            for places, event in answers
            for place, row in zip(places, event.results.rows(), strict=True)
        }
        ordered = [rows[place] for place in range(len(self.inputs))]
        results = PoolingResults((array for array, _ in ordered), (is_hit for _, is_hit in ordered))
        return PoolingEvent(request_id=self.request_id, results=results)

    def with_scoped_inputs(self) -> PoolRequest:
        """Return this request with its scope copied into every input's cache key."""
        if self.scope == EVERYBODY:
            return self
        inputs = tuple(replace(encode_input, scope=self.scope) for encode_input in self.inputs)
        return replace(self, inputs=inputs)


class PoolingResults(list["np.ndarray"]):
    """The results of a request's inputs, in order; ``Task`` gives their shapes.

    The arrays are read-only, because other requests share them.

    Attributes:
        cache_hits: for each input, True if its result came from the cache.
    """

    def __init__(self, results: Iterable[np.ndarray], cache_hits: Iterable[bool]) -> None:
        super().__init__(results)
        self.cache_hits = tuple(cache_hits)

    def rows(self) -> Iterable[tuple[np.ndarray, bool]]:
        """Return for each input its result, and whether that came from the cache."""
        return zip(self, self.cache_hits, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingEvent:
    """The only event of a request that did not fail: all its results."""

    request_id: str
    results: PoolingResults

    @property
    def num_tokens(self) -> int:
        """Return the number of generated tokens in it: none."""
        return 0

    @property
    def ends(self) -> Ends:
        """Return what ends with it."""
        return Ends.REQUEST


@dataclass(frozen=True, slots=True, kw_only=True)
class LateInteraction:
    """Reading of queries and documents by a late-interaction model, which compares token vectors.

    See ColBERT, https://arxiv.org/abs/2004.12832.

    Attributes:
        query_prefix: ids after the special tokens at the beginning of a query.
        document_prefix: ids after the special tokens at the beginning of a document.
        query_length: most tokens of a query; None: the model's limit.
        document_length: most tokens of a document; None: the model's limit.
        expands_to: shorter queries are padded to this many tokens.
        expansion_id: the padding token.
        attends_to_expansion: True if other tokens attend to the padding.
        skipped_ids: tokens of documents that are not compared.
        skips_in_queries: True if ``skipped_ids`` are left out of queries too.
        is_mean: True if a score is the mean over a query's tokens instead of the sum.
    """

    query_prefix: tuple[int, ...] = ()
    document_prefix: tuple[int, ...] = ()
    query_length: int | None = None
    document_length: int | None = None
    expands_to: int = 0
    expansion_id: int | None = None
    attends_to_expansion: bool = False
    skipped_ids: frozenset[int] = frozenset()
    skips_in_queries: bool = False
    is_mean: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """Facts about a loaded pooling model that the rest of the server needs.

    Attributes:
        architecture: ``model_type`` in its config.
        vocab_size: rows of the embedding table: ids from it on are refused at the door.
        max_model_len: longest input in tokens, special ones included.
        tasks: the tasks it can do; the first is its main one.
        dims: length of a vector.
        dtype: the dtype it computes in.
        weight_bytes: size of the weights, in bytes.
        normalizes: True if vectors are to be divided by their norm.
        shorter_dims: lengths that its vectors may be cut to; None for any, empty for none.
        labels: names of a classifier's labels, by index.
        problem_type: for classifiers: the meaning of the logits; None if the config does not say.
        scores_are_logits: for classifiers with one label: True if a pair's score is the logit, not
            its sigmoid.
        is_reward: True if it was made, or is served, to give rewards.
        prompts: texts to put before inputs, by name, as in sentence-transformers.
        default_prompt: name of the prompt for requests that name none.
        pools_prompts: True if a prompt's tokens are pooled into the vector.
        poolings: how token vectors are pooled into one, such as ``mean``.
        late: how texts are read for late interaction; None: the model does not support it.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    dims: int
    dtype: str
    weight_bytes: int
    tasks: tuple[Task, ...] = ("embed", "token_embed")
    normalizes: bool = False
    shorter_dims: tuple[int, ...] | None = ()
    labels: tuple[str, ...] = ()
    problem_type: ProblemType | None = None
    scores_are_logits: bool = False
    is_reward: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None
    pools_prompts: bool = True
    poolings: tuple[str, ...] = ()
    late: LateInteraction | None = None

    @property
    def has_one_score(self) -> bool:
        """True if it gives a text one score, as reward models do, and no labels to choose among."""
        return "classify" in self.tasks and len(self.labels) == 1


@dataclass(frozen=True, slots=True)
class OwnHead:
    """A head that an adapter brings and that replaces its model's.

    Attributes:
        tasks: the tasks that use this head; other tasks keep the model's heads.
        num_labels: number of its labels; 0 if it has none.
    """

    tasks: tuple[Task, ...]
    num_labels: int = 0


class PoolingJob(Protocol):
    """A batch that is computed in stages, with other work in between."""

    @property
    def num_stages(self) -> int:
        """Number of stages left, at least 1; the last one gives the results."""
        ...

    def advance(self) -> None:
        """Compute the next stage; it must not be the last."""
        ...

    def wait(self) -> list[np.ndarray]:
        """Compute the remaining stages and return one float32 array per input; see ``Task``."""
        ...


class PoolingRunner(Protocol):
    """Runs a model over a batch of inputs. Everything happens on the engine thread."""

    def begin(self, inputs: Sequence[PoolingInput], slots: Mapping[str, int]) -> PoolingJob:
        """Return a batch of these inputs, with nothing computed yet.

        ``slots`` maps the content id of every adapter that inputs name to its slot. The slots may
        be reused as soon as this returns.
        """
        ...

    def release(self) -> None:
        """Free the model's memory; it must not run afterwards."""
        ...
