"""What travels between the stages where a text is read instead of continued.

A model reads an input once, and a head makes of its hidden states what the input's task asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from mlx_parallm.types.cache_scope import EVERYBODY, CacheScope

if TYPE_CHECKING:
    import numpy as np

#: What is made of an input of L tokens, always float32:
#: ``embed``: its vector, ``[dims]``, not divided by its length;
#: ``token_embed``: a vector for each token, ``[L, token_dims]``;
#: ``classify``: logits of the labels, ``[labels]``;
#: ``token_classify``: logits of each token's labels, ``[L, labels]``;
#: ``mlm``: logits of the masked LM at ``places``, ``[places, candidates or vocabulary]``;
#: ``mlm_logprobs``: the same as log-probabilities over the whole vocabulary;
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

#: Those that tell labels apart.
LABEL_TASKS: frozenset[Task] = frozenset({"classify", "token_classify"})

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True, slots=True)
class EncodeInput:
    """One text of a request. Equal inputs have equal results.

    Attributes:
        token_ids: with the special ones; at least one.
        task: what is made of it.
        second_at: where a second text begins, whose tokens are of type 1; None: there is none, or
            the model does not tell them apart.
        places: of the tasks of masked LMs: tokens, from 0, whose logits are wanted.
        top_k: of ``mlm_top``: how many tokens are wanted, at most the vocabulary.
        candidates: of ``mlm`` and ``mlm_logprobs``: ids whose logits are wanted, in this order;
            empty: all.
        num_unattended: tokens at the end that attend to all before them, and that none attends to.
        num_unpooled: of ``embed``: tokens at the beginning that are no part of the vector.
        adapter: the content of the adapter that it is read with; None: the model as it is.
        scope: whose requests may have its result; the engine sets it to that of the request.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """A token of an input, and where it is in the text.

    Attributes:
        token_id: its id.
        token: its text in the vocabulary; of an unknown token what stands there.
        start: its first character.
        end: the character after its last.
        is_special: whether it was put around the text.
        continues: whether it belongs to the word of the token before it.
    """

    token_id: int
    token: str
    start: int
    end: int
    is_special: bool
    continues: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRequest:
    """Inputs of one model that are answered together.

    Attributes:
        request_id: chosen by the caller, unique among those in flight.
        model: the model's first name.
        inputs: at least one.
        adapter: the name of the adapter that they are read with; None: the model as it is.
        head: that the adapter had when the inputs were made: it says what results are.
        scope: whose requests may have these results; set where it enters the server.
    """

    request_id: str
    model: str
    inputs: tuple[EncodeInput, ...]
    adapter: str | None = None
    head: OwnHead | None = None
    scope: CacheScope = EVERYBODY

    def with_scoped_inputs(self) -> EncodeRequest:
        """Return the same request whose inputs equal only those of the same scope."""
        if self.scope == EVERYBODY:
            return self
        return replace(self, inputs=tuple(replace(one, scope=self.scope) for one in self.inputs))


class EncodeResults(list["np.ndarray"]):
    """The result of each input of a request, in their order; see ``Task`` for the shapes.

    The arrays are shared with other requests, and read-only.

    Attributes:
        cache_hits: for each input, whether its result was kept from an earlier request.
    """

    def __init__(self, results: Iterable[np.ndarray], cache_hits: Iterable[bool]) -> None:
        super().__init__(results)
        self.cache_hits = tuple(cache_hits)


@dataclass(frozen=True, slots=True, kw_only=True)
class LateInteraction:
    """How queries and documents are read whose tokens' vectors are compared.

    See ColBERT, https://arxiv.org/abs/2004.12832.

    Attributes:
        query_prefix: ids after the special tokens at the beginning of a query.
        document_prefix: the same of a document.
        query_length: most tokens of a query; None: what the model takes.
        document_length: the same of a document.
        expands_to: queries of fewer tokens are filled up to so many.
        expansion_id: the token that they are filled up with.
        attends_to_expansion: whether other tokens attend to those.
        skipped_ids: tokens of documents that are not compared.
        skips_in_queries: whether these tokens of queries are neither.
        is_mean: whether a score is the mean over a query's tokens, and not the sum.
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
class EncoderInfo:
    """What the rest of the server must know about a loaded encoder.

    Attributes:
        architecture: ``model_type`` of its config.
        vocab_size: rows of the embedding table: ids from it on are refused at the door.
        max_model_len: longest input in tokens, special ones included.
        tasks: what it can do; the first is what it was made for.
        dims: numbers of a vector.
        dtype: what it computes in.
        weight_bytes: size of the weights.
        normalizes: whether vectors are to be divided by their lengths.
        shorter_dims: lengths that its vectors may be cut to; None for any, empty for none.
        labels: names of a classifier's labels, by their numbers.
        problem_type: of a classifier: what its logits mean; None where its config does not say.
        scores_are_logits: of a classifier with one label: whether its files want a pair's logit as
            its score, and not the logistic function of it.
        is_reward: whether it was made, or is served, to give rewards.
        prompts: texts to be put before inputs, by name, as sentence-transformers has them.
        default_prompt: the name of the one that is used where none is asked for.
        pools_prompts: whether the tokens of a prompt are part of a vector.
        poolings: how a vector is made of those of the tokens, such as ``mean``.
        late: how texts are read to be compared by the vectors of their tokens; None: it is not
            made for that.
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
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pools_prompts: bool = True
    poolings: tuple[str, ...] = ()
    late: LateInteraction | None = None


@dataclass(frozen=True, slots=True)
class OwnHead:
    """The head that an adapter has instead of its model's.

    Attributes:
        tasks: that it does; for others the model's own heads stay.
        num_labels: that it tells apart; 0 where it tells none.
    """

    tasks: tuple[Task, ...]
    num_labels: int = 0


class EncodeJob(Protocol):
    """A batch that is computed in stages, with other work in between."""

    @property
    def num_stages(self) -> int:
        """Stages that are left; one at least, the last of which gives the results."""
        ...

    def advance(self) -> None:
        """Compute a stage that is not the last."""
        ...

    def results(self) -> list[np.ndarray]:
        """Compute what is left: what each input's task asks for, float32; see ``Task``."""
        ...


class Encoder(Protocol):
    """Runs a model over a batch of inputs. Everything happens on the engine thread."""

    @property
    def info(self) -> EncoderInfo:
        """Facts about the loaded model."""
        ...

    def begin(self, inputs: Sequence[EncodeInput], slots: Mapping[str, int]) -> EncodeJob:
        """A batch of these inputs, of which nothing is computed yet.

        ``slots``: where the adapters are that inputs name, by content. Others may be put there as
        soon as this returns.
        """
        ...

    def run(self, inputs: Sequence[EncodeInput]) -> list[np.ndarray]:
        """The results of a batch at once."""
        ...

    def release(self) -> None:
        """Give back the memory of the model, which runs no more."""
        ...
