"""Runs texts of a generation model through changes of its layers, without caches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from typing_extensions import override

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.models.seq2seq.interface import is_encoder_decoder
from mlx_parallm.models.vision.checkpoint import TOWER
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import BranchedText, ChoiceInput, TrainedText, TrainingInput
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.generation.stock_forward import StockModel
from mlx_parallm.worker.lora.stack import AdapterStack
from mlx_parallm.worker.pooling.forward_shapes import ForwardShapes
from mlx_parallm.worker.pooling.layer_stages import LayerStages, StagedJob
from mlx_parallm.worker.training.branched_forward import BranchedForward
from mlx_parallm.worker.training.trained_model import TrainedModel
from mlx_parallm.worker.weights.loader import parameters_of

# SAME: logits of one token, computed with padding after it and alone, differ by at most this share
# of their norm, in 16 or fewer bits. In float32 those of continuations with a shared prompt differ
# by less; GPUs compute its products in TF32.
SAME, SAME_IN_FLOAT32 = 0.1, 1e-2
NO_PATHS: Collection[str] = ()


class TrainedDecoder(TrainedModel):
    """A generation model whose adapters are trained.

    Rows are right-padded: with causal attention no token attends to the padding after it.
    """

    def __init__(self, stock: StockModel) -> None:
        """Use a model that is served.

        Raises:
            InvalidRequestError: its architecture cannot be run without caches, or has an encoder.
        """
        if is_encoder_decoder(stock.model):
            raise _unfit("it is an encoder-decoder, and texts have no source")
        self._model, self._selector, self._context = stock.model, stock.selector, stock.adapters
        # Texts do not pass through a tower.
        self._modules = {
            path: module
            for path, module in stock.model.named_modules()
            if not path.startswith(TOWER)
        }
        self._stages = LayerStages(stock.model)
        self._adapted = stock.layers
        self._shapes = ForwardShapes.of_device(stock.max_model_len)
        self._check()
        self._branched = BranchedForward.of(stock.model)
        if self._branched is not None and not self._is_exact(self._branched):
            self._branched = None

    @property
    @override
    def modules(self) -> Mapping[str, nn.Module]:
        return self._modules

    @property
    @override
    def parameters(self) -> Mapping[str, mx.array]:
        return parameters_of(self._model)

    @property
    @override
    def layers(self) -> Sequence[nn.Module]:
        return self._stages.layers

    @override
    def of_checkpoint(self, adapter: AdapterWeights) -> AdapterWeights:
        return self._adapted.of_checkpoint(adapter)

    @property
    @override
    def shared(self) -> Collection[str]:
        """Layers of decoders compute each row apart."""
        return NO_PATHS

    @property
    @override
    def head(self) -> None:
        """A model that generates does not classify."""

    @override
    def new_head(self, seed: int) -> None:
        """A model that generates does not classify."""

    @property
    @override
    def shares_prompts(self) -> bool:
        return self._branched is not None

    def texts(self, item: TrainingInput) -> Sequence[TrainedText]:
        """See ``TrainedModel``.

        Choices of one token are all read off the prompt's last token. Others have a row each, or
        one row together if they may share the prompt. The last token of a choice is not read.
        """
        (choices,) = _choices([item])
        if self._is_branched(choices):
            tokens = (*choices.token_ids, *chain.from_iterable(choices.branches))
            return [BranchedText(tokens, tuple(map(len, choices.branches)))]
        return [PoolingInput(tokens) for tokens in choices.sequences]

    def _is_branched(self, item: ChoiceInput) -> bool:
        is_one = item.is_shared or len(item.choices) == 1
        return item.shares and self.shares_prompts and not is_one

    @override
    def length(self, inputs: Sequence[TrainedText]) -> int:
        return self._shapes.length(max(len(item.token_ids) for item in inputs))

    @override
    def run_layers(self, text: TrainedText) -> None:
        self._logits([text], len(text.token_ids), [0])

    @override
    def changed_by(self, stacks: Mapping[str, AdapterStack]) -> AbstractContextManager[None]:
        return self._context.changed_by(stacks)

    def changed_job(
        self,
        inputs: Sequence[TrainingInput],
        stacks: Mapping[str, AdapterStack],
        first_layer: int = 0,
        heads: Sequence[Any] = (),
    ) -> StagedJob:
        """See ``TrainedModel``.

        Results are log-probabilities of the choices, ``[choices]``, or those of their tokens.
        """
        assert not heads, "no head is trained"
        texts = [text for item in inputs for text in self.texts(item)]
        length = self.length(texts)
        self._adapted.wrap(stacks)
        choices = _choices(inputs)
        predictions = _Predictions.of(
            choices, [self._is_branched(item) for item in choices], length
        )
        with self._stages.recorded(first_layer) as outputs, self._context.changed_by(stacks):
            logits = self._logits(texts, length, predictions.rows).astype(mx.float32)
        return StagedJob(outputs, predictions.results(choices, logits))

    def _logits(self, texts: Sequence[TrainedText], length: int, rows: Sequence[int]) -> mx.array:
        """Return logits ``[len(rows), vocab]``; ``rows`` count over tokens ``[B, length]``."""
        chosen = mx.array(list(rows))
        if not self._selector.active:
            logits = self._forward(texts, length)
            return logits.reshape(-1, logits.shape[-1])[chosen]
        with self._selected(chosen):
            return self._forward(texts, length)[:, 0]

    def _forward(self, texts: Sequence[TrainedText], length: int) -> mx.array:
        ids = np.zeros((len(texts), length), np.int32)
        for row, text in enumerate(texts):
            ids[row, : len(text.token_ids)] = text.token_ids
        branched = [text for text in texts if isinstance(text, BranchedText)]
        if not branched:
            return self._model(mx.array(ids))
        assert len(branched) == len(texts), "the inputs of a session have the same form"
        assert self._branched is not None, "it made these texts"
        return self._branched(mx.array(ids.reshape(-1)), branched)

    @contextmanager
    def _selected(self, rows: mx.array) -> Iterator[None]:
        self._selector.rows = rows
        try:
            yield
        finally:
            self._selector.rows = None

    def _check(self) -> None:
        try:
            padded = self._logits([PoolingInput((1, 2, 3))], 5, [2]).astype(mx.float32)
            alone = self._logits([PoolingInput((1, 2, 3))], 3, [2]).astype(mx.float32)
            sees_padding = bool(mx.linalg.norm(padded - alone) > SAME * mx.linalg.norm(alone))
        except MODEL_ERRORS as cause:
            raise _unfit(f"it cannot be run without a cache: {cause}") from cause
        if not self.layers or sees_padding:
            raise _unfit("its tokens depend on those after them")

    def _is_exact(self, branched: BranchedForward) -> bool:
        """True if continuations that share a prompt have the logits of texts of their own."""
        self._branched = branched
        text = BranchedText((1, 2, 3, 4, 5, 4, 1), (2, 2))
        try:
            shared = self._logits([text], 8, [2, 3, 4, 5, 6]).astype(mx.float32)
            first = self._logits([PoolingInput((1, 2, 3, 4, 5))], 5, [2, 3, 4])
            second = self._logits([PoolingInput((1, 2, 3, 4, 1))], 5, [3, 4])
            alone = mx.concatenate([first, second])
            most = SAME_IN_FLOAT32 if alone.dtype == mx.float32 else SAME
            difference = mx.linalg.norm(shared - alone, axis=-1)
            return bool(mx.all(difference <= most * mx.linalg.norm(alone, axis=-1)))
        except MODEL_ERRORS:
            return False


def _choices(inputs: Sequence[TrainingInput]) -> list[ChoiceInput]:
    for item in inputs:
        assert isinstance(item, ChoiceInput), "a decoder continues prompts"
    return cast("list[ChoiceInput]", list(inputs))


def _unfit(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"This architecture cannot be trained here: {why}.", param="model")


@dataclass(frozen=True, slots=True)
class _Predictions:
    """Which tokens of a forward predict the tokens of all choices.

    Attributes:
        rows: indices over the tokens ``[B, L]`` of a forward that predict, each once.
        sources: for each predicted token, the index of its row in ``rows``.
        tokens: the predicted tokens.
        places: int32 ``[choices, longest]``: for each choice of all inputs, indices of its tokens
            in ``tokens``.
        weights: float32, of the same shape: what each counts; 0 pads shorter choices.
    """

    rows: list[int]
    sources: list[int]
    tokens: list[int]
    places: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(
        cls, inputs: Sequence[ChoiceInput], are_branched: Sequence[bool], length: int
    ) -> _Predictions:
        """Return them for inputs whose texts are the rows of a forward, in their order."""
        rows: dict[int, int] = {}
        sources: list[int] = []
        tokens: list[int] = []
        first = 0
        longest = max(len(choice) for item in inputs for choice in item.choices)
        count = sum(len(item.choices) for item in inputs)
        places, weights = np.zeros((count, longest), np.int32), np.zeros((count, longest))
        choice_rows = iter(range(count))
        for item, is_branched in zip(inputs, are_branched, strict=True):
            every = _predicting(item, first, length, is_branched=is_branched)
            for index, (choice, predicting) in enumerate(zip(item.choices, every, strict=True)):
                row = next(choice_rows)
                places[row, : len(choice)] = range(len(tokens), len(tokens) + len(choice))
                weights[row, : len(choice)] = _token_weights(item, index)
                sources += [rows.setdefault(place, len(rows)) for place in predicting]
                tokens += choice
            first += 1 if is_branched else len(item.sequences)
        return cls(list(rows), sources, tokens, places, weights.astype(np.float32))

    def results(self, inputs: Sequence[ChoiceInput], logits: mx.array) -> list[mx.array]:
        """Return the result of each input from logits ``[len(rows), vocab]``."""
        sources = mx.array(self.sources)
        of_tokens = logits[sources, mx.array(self.tokens)] - mx.logsumexp(logits, axis=-1)[sources]
        of_choices = mx.sum(of_tokens[mx.array(self.places)] * mx.array(self.weights), axis=-1)
        choices = [0, *accumulate(len(item.choices) for item in inputs)]
        tokens = [0, *accumulate(sum(map(len, item.choices)) for item in inputs)]
        return [
            of_tokens[begin:end] if item.by_token else of_choices[first:last]
            for item, (begin, end), (first, last) in zip(
                inputs, pairwise(tokens), pairwise(choices), strict=True
            )
        ]


def _token_weights(item: ChoiceInput, index: int) -> np.ndarray:
    """Return what each token of a choice counts."""
    size = len(item.choices[index])
    weights = np.array(item.weights[index] if item.weights else [1.0] * size)
    return weights / size if item.averages else weights


def _predicting(
    item: ChoiceInput, first: int, length: int, *, is_branched: bool
) -> Iterator[list[int]]:
    """Yield for each choice which tokens of a forward predict its tokens.

    Args:
        item: the input.
        first: the index of its first row in the forward.
        length: of the rows.
        is_branched: True if its choices share a row.
    """
    num_prompt = len(item.token_ids)
    at_row, after = first * length, num_prompt
    for branch in item.branches:
        begin = at_row + after
        yield [at_row + num_prompt - 1, *range(begin, begin + len(branch))]
        if is_branched:
            after += len(branch)
        elif not item.is_shared:
            at_row += length
