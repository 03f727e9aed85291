"""Heads of pooling models: they turn the hidden states of a batch into results, by task."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.types.pooling import PoolingInput, Task
from mlx_parallm.worker.pooling.dense_layers import load_dense
from mlx_parallm.worker.pooling.vectors import pooled
from mlx_parallm.worker.sampling.logprobs import likeliest

#: ``TASKS``: tasks of a checkpoint by the head that its config names, the main one first.
TASKS: Mapping[str | None, tuple[Task, ...]] = {
    None: ("embed", "token_embed"),
    "masked_lm": ("mlm", "mlm_logprobs", "mlm_top", "sparse", "embed", "token_embed"),
    "sequence": ("classify", "embed", "token_embed"),
    "token": ("token_classify", "embed", "token_embed"),
}


def vector_facts(spec: VectorSpec) -> dict[str, Any]:
    """Return the fields of ``PoolingInfo`` that describe vectors."""
    return {
        "normalizes": spec.normalizes,
        "shorter_dims": spec.shorter_dims,
        "prompts": spec.prompts,
        "default_prompt": spec.default_prompt,
        "poolings": spec.poolings,
        "pools_prompts": spec.pools_prompts,
    }


def by_purpose(tasks: tuple[Task, ...], spec: VectorSpec) -> tuple[Task, ...]:
    """Return the tasks, with ``token_embed`` first for models that compare tokens (ColBERT)."""
    if not spec.compares_tokens:
        return tasks
    return ("token_embed", *(task for task in tasks if task != "token_embed"))


# A head takes inputs of one task, their hidden states [B, L, D] and their mask, bool [B, L].
Head = Callable[[Sequence[PoolingInput], mx.array, mx.array], list[mx.array]]


@dataclass(frozen=True, slots=True)
class _DenseLayers:
    """Layers after the trunk: for the vectors of tokens, and for those of texts."""

    of_tokens: Sequence[Callable[[mx.array], mx.array]]
    of_texts: Sequence[Callable[[mx.array], mx.array]]


class EncoderHeads:
    """The heads of one model.

    Args:
        model: a ``Model`` of ``mlx_parallm.models``, or with its interface.
        spec: how vectors are made.
        dense: dense layers already read for this spec; None: they are read here.
    """

    def __init__(self, model: Any, spec: VectorSpec, dense: _DenseLayers | None = None) -> None:
        self._model = model
        self._spec = spec
        self._dense = dense or _DenseLayers(
            [load_dense(layer) for layer in spec.token_dense],
            [load_dense(layer) for layer in spec.dense],
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
        """Return heads that share the dense layers and use another model's head."""
        return EncoderHeads(model, self._spec, self._dense)

    def release(self) -> None:
        """Drop the arrays; nothing may run afterwards."""
        self._dense = _DenseLayers([], [])

    def run(
        self, inputs: Sequence[PoolingInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        """Return the result of each input, float32 and not yet evaluated; see ``Task``.

        Args:
            inputs: inputs of any tasks.
            hidden: last hidden states ``[B, L, D]``.
            mask: bool ``[B, L]``: True for tokens, which are at the beginning of each row.
        """
        results: list[Any] = [None] * len(inputs)
        tasks: set[Task] = {item.task for item in inputs}
        for task in tasks:
            rows = [row for row, item in enumerate(inputs) if item.task == task]
            chosen = slice(None) if len(rows) == len(inputs) else mx.array(rows)
            answers = self._heads[task]([inputs[row] for row in rows], hidden[chosen], mask[chosen])
            for row, result in zip(rows, answers, strict=True):
                results[row] = result.astype(mx.float32)
        return results

    def _embed(
        self, inputs: Sequence[PoolingInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        first = None
        if any(item.num_unpooled for item in inputs):
            first = mx.array([item.num_unpooled for item in inputs])
        vectors = pooled(self._token_vectors(hidden), mask, self._spec.poolings, first)
        for layer in self._dense.of_texts:
            vectors = layer(vectors)
        return list(vectors[:, : self._spec.dims])

    def _token_embed(
        self, inputs: Sequence[PoolingInput], hidden: mx.array, mask: mx.array
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
        self, inputs: Sequence[PoolingInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        del inputs
        return list(self._model.sequence_logits(hidden, mask))

    def _token_classify(
        self, inputs: Sequence[PoolingInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        del mask
        return _cut(self._model.token_logits(hidden), inputs)

    def _mlm(
        self, inputs: Sequence[PoolingInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        del mask
        # For candidates only their rows of the decoder matrix are computed: it is most of the head.
        wanted = {item.candidates for item in inputs}
        if len(wanted) == 1 and (same := wanted.pop()):
            logits = self._logits(inputs, hidden, range(len(inputs)), mx.array(same))
            return _of_each(logits.astype(mx.float32), inputs)
        ids = sorted({token_id for item in inputs for token_id in item.candidates})
        results: dict[int, mx.array] = {}
        for wants_all in (False, True):
            rows = [row for row, item in enumerate(inputs) if (not item.candidates) == wants_all]
            if not rows:
                continue
            group = [inputs[row] for row in rows]
            logits = self._logits(group, hidden, rows, None if wants_all else mx.array(ids))
            columns = None if wants_all else {token_id: at for at, token_id in enumerate(ids)}
            results.update(zip(rows, _chosen(logits, group, columns), strict=True))
        return [results[row] for row in range(len(inputs))]

    def _mlm_logprobs(
        self, inputs: Sequence[PoolingInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        del mask
        logits = self._logits(inputs, hidden, range(len(inputs))).astype(mx.float32)
        return _chosen(logits - mx.logsumexp(logits, axis=-1, keepdims=True), inputs)

    def _mlm_top(
        self, inputs: Sequence[PoolingInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        del mask
        logits = self._logits(inputs, hidden, range(len(inputs))).astype(mx.float32)
        most = max(item.top_k for item in inputs)
        ids = _likeliest(logits, min(most, logits.shape[-1]))
        logprobs = mx.take_along_axis(logits, ids, axis=-1)
        logprobs = logprobs - mx.logsumexp(logits, axis=-1, keepdims=True)
        # Ids are exact in float32: no vocabulary has 2**24 tokens.
        both = mx.stack([ids.astype(mx.float32), logprobs], axis=1)
        parts = _of_each(both, inputs)
        return [part[..., : item.top_k] for part, item in zip(parts, inputs, strict=True)]

    def _logits(
        self,
        inputs: Sequence[PoolingInput],
        hidden: mx.array,
        rows: Sequence[int],
        ids: mx.array | None = None,
    ) -> mx.array:
        """Return the logits ``[places, ids]`` of all inputs' places.

        The head runs at the places alone: over a whole short text it would cost more than the
        trunk.

        Args:
            inputs: the inputs.
            hidden: hidden states of a batch.
            rows: the row of each input in ``hidden``.
            ids: the tokens whose logits are computed; None: the whole vocabulary.
        """
        chosen = [row for row, item in zip(rows, inputs, strict=True) for _ in item.places]
        places = [place for item in inputs for place in item.places]
        return self._model.mlm_logits(hidden[mx.array(chosen), mx.array(places)], ids)

    def _sparse(
        self, inputs: Sequence[PoolingInput], hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        """Return SPLADE's weights, https://arxiv.org/abs/2109.10086, equation 6."""
        del inputs
        weights = mx.log1p(mx.maximum(self._model.mlm_logits(hidden).astype(mx.float32), 0))
        return list(mx.max(weights * mask[..., None], axis=1))


def _likeliest(logits: mx.array, count: int) -> mx.array:
    """Return the ids of the ``count`` largest logits of each row; see ``likeliest``.

    Among equal logits the smaller ids are kept, so that results do not depend on other inputs.
    """
    least = mx.take_along_axis(logits, likeliest(logits, count)[:, -1:], axis=-1)
    above, equal = logits > least, logits == least
    room = count - mx.sum(above, axis=-1, keepdims=True)
    kept = above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))
    return likeliest(mx.where(kept, logits, -mx.inf), count)


def _cut(rows: mx.array, inputs: Sequence[PoolingInput]) -> list[mx.array]:
    return [row[: len(item.token_ids)] for row, item in zip(rows, inputs, strict=True)]


def _chosen(
    logits: mx.array, inputs: Sequence[PoolingInput], columns: Mapping[int, int] | None = None
) -> list[mx.array]:
    """Return each input's part of ``[places, vocabulary]``, cut to its candidates if it has any.

    ``columns`` maps a token id to its column in ``logits``; None: the columns are the token ids.
    """
    results = []
    for item, part in zip(inputs, _of_each(logits, inputs), strict=True):
        wanted = [token if columns is None else columns[token] for token in item.candidates]
        results.append(part[:, mx.array(wanted)] if wanted else part)
    return results


def _of_each(rows: mx.array, inputs: Sequence[PoolingInput]) -> list[mx.array]:
    """Return, for each input, the rows of its places."""
    ends = [0, *itertools.accumulate(len(item.places) for item in inputs)]
    return [rows[begin:end] for begin, end in itertools.pairwise(ends)]
