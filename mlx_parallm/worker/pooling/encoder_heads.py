"""What is made of an encoder's hidden states, by task; all of a batch is computed in one go."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.types.pooling import EncodeInput, Task
from mlx_parallm.worker.pooling.dense_layers import load_dense
from mlx_parallm.worker.pooling.vectors import pooled
from mlx_parallm.worker.sampling.logprobs import likeliest

#: The tasks of a checkpoint by the head that its config names; the first is what it was made for.
TASKS: Mapping[str | None, tuple[Task, ...]] = {
    None: ("embed", "token_embed"),
    "masked_lm": ("mlm", "mlm_logprobs", "mlm_top", "sparse", "embed", "token_embed"),
    "sequence": ("classify", "embed", "token_embed"),
    "token": ("token_classify", "embed", "token_embed"),
}


def vector_facts(spec: VectorSpec) -> dict[str, Any]:
    """What an ``EncoderInfo`` says of vectors."""
    return {
        "normalizes": spec.normalizes,
        "shorter_dims": spec.shorter_dims,
        "prompts": spec.prompts,
        "default_prompt": spec.default_prompt,
        "poolings": spec.poolings,
        "pools_prompts": spec.pools_prompts,
    }


def by_purpose(tasks: tuple[Task, ...], spec: VectorSpec) -> tuple[Task, ...]:
    """The tasks; a vector for each token first where the model is made for these (ColBERT)."""
    if not spec.compares_tokens:
        return tasks
    return ("token_embed", *(one for one in tasks if one != "token_embed"))


# Takes inputs of one task, their hidden states [B, L, D] and their mask, bool [B, L].
Head = Callable[[Sequence[EncodeInput], mx.array, mx.array], list[mx.array]]


@dataclass(frozen=True, slots=True)
class _DenseLayers:
    """What vectors pass: those of tokens, and those of texts."""

    of_tokens: Sequence[Callable[[mx.array], mx.array]]
    of_texts: Sequence[Callable[[mx.array], mx.array]]


class EncoderHeads:
    """The heads of one encoder.

    Args:
        model: a ``Model`` of ``mlx_parallm.models``.
        spec: how vectors are made.
        dense: of another one with this spec; None: they are read.
    """

    def __init__(self, model: Any, spec: VectorSpec, dense: _DenseLayers | None = None) -> None:
        self._model = model
        self._spec = spec
        self._dense = dense or _DenseLayers(
            [load_dense(one) for one in spec.token_dense], [load_dense(one) for one in spec.dense]
        )
        self._heads: dict[Task, Head] = {
            "embed": self._embed,
            "token_embed": self._token_embed,
            "classify": self._classify,
            "token_classify": self._token_classify,
            "mlm": self._mlm,
            "mlm_logprobs": self._mlm_logprobs,
            "mlm_top": self._mlm_top,
            "sparse": self._sparse,
        }

    def with_model(self, model: Any) -> EncoderHeads:
        """The same with another model's head."""
        return EncoderHeads(model, self._spec, self._dense)

    def release(self) -> None:
        """Hold no array; nothing is to be run any more."""
        self._dense = _DenseLayers([], [])

    def run(
        self, inputs: Sequence[EncodeInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        """The result of each input, float32, which is not computed yet.

        Args:
            inputs: of any tasks.
            hidden: ``[B, L, D]``.
            mask: bool ``[B, L]``: the tokens, at the beginning of each row.
        """
        found: list[Any] = [None] * len(inputs)
        tasks: set[Task] = {one.task for one in inputs}
        for task in tasks:
            rows = [row for row, one in enumerate(inputs) if one.task == task]
            chosen = slice(None) if len(rows) == len(inputs) else mx.array(rows)
            results = self._heads[task]([inputs[row] for row in rows], hidden[chosen], mask[chosen])
            for row, result in zip(rows, results, strict=True):
                found[row] = result.astype(mx.float32)
        return found

    def _embed(
        self, inputs: Sequence[EncodeInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        first = None
        if any(one.num_unpooled for one in inputs):
            first = mx.array([one.num_unpooled for one in inputs])
        vectors = pooled(self._token_vectors(hidden), mask, self._spec.poolings, first)
        for layer in self._dense.of_texts:
            vectors = layer(vectors)
        return list(vectors[:, : self._spec.dims])

    def _token_embed(
        self, inputs: Sequence[EncodeInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        del mask
        return _cut(self._token_vectors(hidden), inputs)

    def _token_vectors(self, hidden: mx.array) -> mx.array:
        hidden = hidden.astype(mx.float32)
        for layer in self._dense.of_tokens:
            hidden = layer(hidden)
        if self._spec.normalizes_tokens:
            hidden = hidden / mx.maximum(mx.linalg.norm(hidden, axis=-1, keepdims=True), 1e-12)
        return hidden

    def _classify(
        self, inputs: Sequence[EncodeInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        del inputs
        return list(self._model.sequence_logits(hidden, mask))

    def _token_classify(
        self, inputs: Sequence[EncodeInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        del mask
        return _cut(self._model.token_logits(hidden), inputs)

    def _mlm(
        self, inputs: Sequence[EncodeInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        del mask
        # Of candidates only these rows of the decoder are computed: it is most of the head.
        ids = sorted({number for one in inputs for number in one.candidates})
        found: dict[int, mx.array] = {}
        for wants_all in (False, True):
            rows = [row for row, one in enumerate(inputs) if (not one.candidates) == wants_all]
            if not rows:
                continue
            own = [inputs[row] for row in rows]
            logits = self._logits(own, hidden, rows, None if wants_all else mx.array(ids))
            columns = None if wants_all else {number: at for at, number in enumerate(ids)}
            found.update(zip(rows, _chosen(logits, own, columns), strict=True))
        return [found[row] for row in range(len(inputs))]

    def _mlm_logprobs(
        self, inputs: Sequence[EncodeInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        del mask
        logits = self._logits(inputs, hidden, range(len(inputs))).astype(mx.float32)
        return _chosen(logits - mx.logsumexp(logits, axis=-1, keepdims=True), inputs)

    def _mlm_top(
        self, inputs: Sequence[EncodeInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        del mask
        logits = self._logits(inputs, hidden, range(len(inputs))).astype(mx.float32)
        most = max(one.top_k for one in inputs)
        ids = _likeliest(logits, min(most, logits.shape[-1]))
        found = mx.take_along_axis(logits, ids, axis=-1)
        found = found - mx.logsumexp(logits, axis=-1, keepdims=True)
        # Ids are exact in float32: no vocabulary has 2**24.
        both = mx.stack([ids.astype(mx.float32), found], axis=1)
        rows = _of_each(both, inputs)
        return [own[..., : one.top_k] for own, one in zip(rows, inputs, strict=True)]

    def _logits(
        self,
        inputs: Sequence[EncodeInput],
        hidden: mx.array,
        rows: Sequence[int],
        ids: mx.array | None = None,
    ) -> mx.array:
        """Of the places alone: the head costs more than the rest for a text of some words.

        ``rows``: where the inputs are in ``hidden``; ``ids``: of which tokens; None: of all.
        """
        chosen = [row for row, one in zip(rows, inputs, strict=True) for _ in one.places]
        places = [place for one in inputs for place in one.places]
        return self._model.mlm_logits(hidden[mx.array(chosen), mx.array(places)], ids)

    def _sparse(
        self, inputs: Sequence[EncodeInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        """SPLADE's, https://arxiv.org/abs/2109.10086, equation 6."""
        del inputs
        weights = mx.log1p(mx.maximum(self._model.mlm_logits(hidden).astype(mx.float32), 0))
        return list(mx.max(weights * mask[..., None], axis=1))


def _likeliest(logits: mx.array, count: int) -> mx.array:
    """As ``likeliest``; of equal ones the earlier are kept, so that no other input matters."""
    least = mx.take_along_axis(logits, likeliest(logits, count)[:, -1:], axis=-1)
    above, equal = logits > least, logits == least
    room = count - mx.sum(above, axis=-1, keepdims=True)
    kept = above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))
    return likeliest(mx.where(kept, logits, -mx.inf), count)


def _cut(rows: mx.array, inputs: Sequence[EncodeInput]) -> list[mx.array]:
    return [row[: len(one.token_ids)] for row, one in zip(rows, inputs, strict=True)]


def _chosen(
    logits: mx.array, inputs: Sequence[EncodeInput], columns: Mapping[int, int] | None = None
) -> list[mx.array]:
    """Each input's rows of ``[places, vocabulary]``, and of these its candidates.

    ``columns``: where a token is that ``logits`` has; None: it has them all.
    """
    found = []
    for one, own in zip(inputs, _of_each(logits, inputs), strict=True):
        wanted = [number if columns is None else columns[number] for number in one.candidates]
        found.append(own[:, mx.array(wanted)] if wanted else own)
    return found


def _of_each(rows: mx.array, inputs: Sequence[EncodeInput]) -> list[mx.array]:
    """The rows of each input's places."""
    ends = [0, *itertools.accumulate(len(one.places) for one in inputs)]
    return [rows[begin:end] for begin, end in itertools.pairwise(ends)]
