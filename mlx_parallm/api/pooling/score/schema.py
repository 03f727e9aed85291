"""The bodies of ``POST /v1/score`` and ``/generative_scoring``.

vLLM's pairs of texts (https://docs.vllm.ai, "Score API"), and SGLang's labels after a query and an
item (https://docs.sglang.io, "Scoring"), which vLLM has as ``/generative_scoring``.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr, WithJsonSchema

from mlx_parallm.api.http.forms import INT64
from mlx_parallm.api.pooling.inputs.schema import Inputs, PoolingFields, Texts, is_list_of
from mlx_parallm.api.turns.fields import MAX_NAMED_TOKENS


def _text_or_ids(value: Any) -> str | list[int]:
    if isinstance(value, str) or is_list_of(value, int):
        return value
    raise ValueError("must be a text or token ids")


_QUERY_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}
Query = Annotated[Any, BeforeValidator(_text_or_ids), WithJsonSchema(_QUERY_SCHEMA)]


class ScoreRequest(PoolingFields):
    """Pairs of texts, or a ``query`` with ``items``."""

    text_1: Texts | None = Field(None, description="One text, or as many as text_2 has.")
    text_2: Texts | None = Field(None, description="What text_1 is compared with.")
    queries: Texts | None = Field(None, description="The same as text_1.")
    documents: Texts | None = Field(None, description="The same as text_2.")
    data_1: Texts | None = Field(None, description="The same as text_1.")
    data_2: Texts | None = Field(None, description="The same as text_2.")
    use_activation: StrictBool = Field(True, description="False: a cross-encoder's logits.")
    query: Query | None = Field(None, description="Read with every item.")
    items: Inputs | None = Field(
        None, description="Texts or token ids, read with the query; or, with queries, texts."
    )
    label_token_ids: list[Annotated[StrictInt, Field(ge=0)]] = Field(
        default_factory=list[int],
        max_length=MAX_NAMED_TOKENS,
        description="Tokens whose probabilities after query and item are reported.",
    )
    apply_softmax: StrictBool | None = Field(
        None, description="True: probabilities among the labels alone."
    )
    item_first: StrictBool = Field(False, description="Put items before the query.")
    add_special_tokens: StrictBool = Field(
        True, description="Tokenise texts with the model's special tokens, such as BOS."
    )
    priority: StrictInt | None = Field(None, ge=-INT64, lt=INT64, description="Lower runs first.")
    cache_salt: StrictStr | None = Field(
        None, max_length=1024, description="Share cached prefixes only with the same salt."
    )
