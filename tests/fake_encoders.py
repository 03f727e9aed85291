"""Encoders without a model: what they make of an input is a function of its token ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.answer_reader import AnswerReader
from mlx_parallm.engine.core import EngineCore
from mlx_parallm.engine.policies import NamedAdapter
from mlx_parallm.engine.residency import ModelEntry
from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.pooling.client import PoolingClient
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer
from mlx_parallm.types.errors import InvalidRequestError, ModelNotFoundError, ParallmError
from mlx_parallm.types.pooling import (
    PoolingEvent,
    PoolingInfo,
    PoolingInput,
    PoolingResults,
    PoolRequest,
    TokenSpan,
)
from mlx_parallm.types.token_limit import ANY_LENGTH, TokenLimit

CLS, SEP, MASK, FIRST_WORD = 2, 3, 4, 5
Compute = Callable[[PoolingInput, PoolingInfo], np.ndarray]


class WordEncoder:
    """Stands in for an ``EncoderTokenizer``.

    Words ``w5`` and so on are tokens; others are token 1. A text gets CLS and SEP around it.
    """

    vocab_size = 100
    mask_token = "w4"
    pad_id = 0
    special_ids = frozenset({0, CLS, SEP, MASK})
    begin_ids = (CLS,)

    def __init__(self, *, has_chat_template: bool = False) -> None:
        self.has_chat_template = has_chat_template

    def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        limit: TokenLimit = ANY_LENGTH,
    ) -> list[tuple[int, ...]]:
        bare = [self._ids(text) for text in texts]
        return [(CLS, *ids, SEP) if add_special_tokens else ids for ids in bare]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[int, ...]:
        if not self.has_chat_template:
            raise InvalidRequestError("This model has no chat template.", param="messages")
        return tuple(token for turn in messages for token in (CLS, *self._ids(turn["content"])))

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, limit: TokenLimit = ANY_LENGTH
    ) -> list[tuple[tuple[int, ...], int | None]]:
        firsts = [(CLS, *self._ids(query), SEP) for query, _ in pairs]
        return [
            ((*first, *self._ids(second), SEP), len(first))
            for first, (_, second) in zip(firsts, pairs, strict=True)
        ]

    def spans(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        limit: TokenLimit = ANY_LENGTH,
    ) -> list[list[TokenSpan]]:
        special = [_special(CLS), _special(SEP)] if add_special_tokens else []
        return [[*special[:1], *self._words(text), *special[1:]] for text in texts]

    def _words(self, text: str) -> list[TokenSpan]:
        return [
            TokenSpan(
                token_id=self._ids(match.group())[0],
                token=match.group(),
                start=match.start(),
                end=match.end(),
                is_special=False,
                continues=False,
            )
            for match in re.finditer(r"\S+", text)
        ]

    def join(self, tokens: Sequence[str]) -> str:
        return " ".join(tokens)

    def token_id(self, token: str) -> int | None:
        return self._ids(token)[0]

    def token_string(self, token_id: int) -> str:
        return f"w{token_id}"

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        first = FIRST_WORD if skip_special_tokens else 0
        return " ".join(f"w{token_id}" for token_id in token_ids if token_id >= first)

    def cut(
        self, token_ids: tuple[int, ...], length: int, *, from_left: bool = False
    ) -> tuple[int, ...]:
        if len(token_ids) <= length:
            return token_ids
        return token_ids[len(token_ids) - length :] if from_left else token_ids[:length]

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(
            int(word[1:]) if word[:1] == "w" and word[1:].isdigit() else 1 for word in text.split()
        )


def _special(token_id: int) -> TokenSpan:
    return TokenSpan(
        token_id=token_id, token=f"w{token_id}", start=0, end=0, is_special=True, continues=False
    )


def make_encoder(*names: str, chats: bool = False, **changes: Any) -> PoolingModel:
    """Return a model's facts; ``chats``: whether it has a chat template."""
    facts: dict[str, Any] = {
        "architecture": "fake",
        "vocab_size": WordEncoder.vocab_size,
        "max_model_len": 16,
        "dims": 4,
        "dtype": "float32",
        "weight_bytes": 0,
        "normalizes": True,
    }
    return PoolingModel(
        names=names or ("encoder",),
        root="/models/encoder",
        created=1,
        tokenizer=cast("EncoderTokenizer", WordEncoder(has_chat_template=chats)),
        info=PoolingInfo(**(facts | changes)),
        max_batch_tokens=64,
        max_waiting=100,
    )


def computed(item: PoolingInput, info: PoolingInfo) -> np.ndarray:
    """Return a result of the task's shape, by a random generator that the input seeds."""
    source = np.random.RandomState([*item.token_ids, item.second_at or 0])
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (info.dims,),
        "token_embed": (len(item.token_ids), info.dims),
        "classify": (len(info.labels),),
        "token_classify": (len(item.token_ids), len(info.labels)),
        "mlm": (len(item.places), len(item.candidates) or info.vocab_size),
        "mlm_logprobs": (len(item.places), len(item.candidates) or info.vocab_size),
        "sparse": (info.vocab_size,),
    }
    if item.task == "mlm_top":
        rows = source.standard_normal((len(item.places), info.vocab_size))
        ids = np.argsort(-rows, axis=1)[:, : item.top_k]
        return np.stack([ids, np.take_along_axis(rows, ids, axis=1)], axis=1).astype(np.float32)
    result = source.standard_normal(shapes[item.task]).astype(np.float32)
    return np.maximum(result - 1, 0) if item.task == "sparse" else result


class FakeAdapters:
    """The part of ``EngineControl`` that names adapters: there are none."""

    def named(self, name: str) -> NamedAdapter | None:
        return None

    async def ensure_loaded(self, name: str, base: str) -> None:
        raise ModelNotFoundError(name)

    async def refresh(self) -> None:
        pass


class FakeCore:
    """Answers at once. It has the methods of a door that ``PoolingClient`` calls."""

    control = FakeAdapters()

    def __init__(self, models: Sequence[PoolingModel]) -> None:
        self.served = list(models)
        self.compute: Compute = computed
        self.requests: list[PoolRequest] = []
        self.aborted: list[str] = []
        self.refusal: ParallmError | None = None
        self.hangs = False

    def statuses(self) -> Sequence[ModelStatus]:
        return [
            ModelEntry(ModelConfig(), model.names, model, is_loaded=True).status()
            for model in self.served
        ]

    def find(self, name: str) -> ModelStatus | None:
        return next((status for status in self.statuses() if name in status.names), None)

    def not_found(self, name: str) -> ModelNotFoundError:
        return ModelNotFoundError(name)

    async def wait(self, name: str, client: str = "") -> None:
        raise ModelNotFoundError(name)

    async def open_reader(self, request: PoolRequest) -> AnswerReader[PoolingResults]:
        if self.refusal is not None:
            raise self.refusal
        status = self.find(request.model)
        if status is None:
            raise ModelNotFoundError(request.model)
        self.requests.append(request)
        reader = AnswerReader[PoolingResults](request)
        if not self.hangs:
            results = [self.compute(item, status.model.info) for item in request.inputs]
            answer = PoolingResults(results, [False] * len(results))
            reader.put(PoolingEvent(request_id=request.request_id, results=answer))
        return reader

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


class FakeEncoders(PoolingClient):
    """For ``FakeEngine.pooling``; ``thread`` records the requests and decides their results."""

    def __init__(self, *models: PoolingModel) -> None:
        self.thread = FakeCore(models)
        super().__init__(cast("EngineCore", self.thread))
