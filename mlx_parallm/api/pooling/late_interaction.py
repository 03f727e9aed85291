"""How well texts fit queries by the vectors of their tokens: MaxSim.

ColBERT (Khattab & Zaharia 2020, https://arxiv.org/abs/2004.12832), equation 3: for each token of a
query the largest cosine with a token of the document, summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from mlx_parallm.api.pooling.embeddings.answer import unit_vectors
from mlx_parallm.api.pooling.inputs.encode import Role, single_inputs
from mlx_parallm.api.pooling.inputs.prompts import prompt_of_type
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import EncodeInput, LateInteraction

Side = Literal["query", "document"]


async def side_inputs(
    texts: Sequence[Any],
    model: PoolingModel,
    side: Side,
    *,
    truncate: int | None = None,
    param: str = "input",
) -> tuple[EncodeInput, ...]:
    """Queries or documents, of a model that was made to compare them.

    Raises:
        InvalidRequestError: it was not; they are no texts; see also ``single_inputs``.
    """
    if model.info.late is None or not all(isinstance(one, str) for one in texts):
        raise InvalidRequestError(
            "input_type is for texts, and for models of late interaction.", param="input_type"
        )
    read = query_inputs if side == "query" else document_inputs
    return await read(texts, model, truncate=truncate, param=param)


def side_vectors(
    one: EncodeInput, vectors: np.ndarray, side: Side, late: LateInteraction
) -> np.ndarray:
    """The vectors of a query or a document that count; see ``compared``."""
    skips = side == "document" or late.skips_in_queries
    return compared(one, vectors, late.skipped_ids if skips else frozenset())


async def query_inputs(
    texts: Sequence[str], model: PoolingModel, *, truncate: int | None = None, param: str = "query"
) -> tuple[EncodeInput, ...]:
    """Queries as the model was made to read them; see ``single_inputs``."""
    late = model.info.late or LateInteraction()
    inputs = await single_inputs(
        texts,
        model,
        "token_embed",
        role=Role(
            prompt=prompt_of_type(model.info, "query"),
            marker=late.query_prefix,
            longest=late.query_length,
        ),
        truncate=truncate,
        param=param,
    )
    return tuple(_expanded(one, late, model.info.max_model_len) for one in inputs)


async def document_inputs(
    texts: Sequence[str],
    model: PoolingModel,
    *,
    truncate: int | None = None,
    param: str = "documents",
) -> tuple[EncodeInput, ...]:
    """Documents as the model was made to read them; see ``single_inputs``."""
    late = model.info.late or LateInteraction()
    return await single_inputs(
        texts,
        model,
        "token_embed",
        role=Role(
            prompt=prompt_of_type(model.info, "document"),
            marker=late.document_prefix,
            longest=late.document_length,
        ),
        truncate=truncate,
        param=param,
    )


def compared(one: EncodeInput, vectors: np.ndarray, skipped_ids: frozenset[int]) -> np.ndarray:
    """The vectors of an input's tokens that count, ``[tokens, dims]``, each of length 1."""
    if skipped_ids:
        vectors = vectors[[token not in skipped_ids for token in one.token_ids]]
    return unit_vectors(vectors)


def max_sim(query: np.ndarray, document: np.ndarray, *, is_mean: bool = False) -> float:
    """The largest cosine of each query's token, summed, or their mean; 0 where there is none."""
    if not len(query) or not len(document):
        return 0.0
    best = (query @ document.T).max(axis=1)
    return float(best.mean() if is_mean else best.sum())


def _expanded(one: EncodeInput, late: LateInteraction, longest: int) -> EncodeInput:
    missing = min(late.expands_to, longest) - len(one.token_ids)
    if missing <= 0 or late.expansion_id is None:
        return one
    return replace(
        one,
        token_ids=(*one.token_ids, *(late.expansion_id,) * missing),
        num_unattended=0 if late.attends_to_expansion else missing,
    )
