"""Runs batches of a pooling model in which each input may name an adapter."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from typing_extensions import override

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.types.pooling import (
    LABEL_TASKS,
    OwnHead,
    PoolingInfo,
    PoolingInput,
    PoolingRunner,
    Task,
)
from mlx_parallm.types.training import TrainedText, TrainingInput
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.properties import give_back_memory
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from mlx_parallm.worker.lora.adapted_layers import (
    AdaptedLayers,
    find_module,
    product_dtype,
    unfit_error,
)
from mlx_parallm.worker.lora.adapter_store import SlotTarget
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.lora.rows import NO_ADAPTER, AdapterRows
from mlx_parallm.worker.lora.stack import AdapterStack
from mlx_parallm.worker.pooling.encoder_heads import EncoderHeads
from mlx_parallm.worker.pooling.forward_shapes import ForwardShapes
from mlx_parallm.worker.pooling.layer_stages import LayerStages, StagedJob
from mlx_parallm.worker.pooling.own_heads import HeadMaker, TrainableHead
from mlx_parallm.worker.weights.loader import parameters_of

#: ``Forward`` computes hidden states ``[B, L, D]`` and the bool mask ``[B, L]`` of inputs.
Forward = Callable[[Sequence[PoolingInput]], tuple[mx.array, mx.array]]
#: ``NO_SLOTS``: the adapters' slots of a batch without adapters.
NO_SLOTS: Mapping[str, int] = {}
# ONE_TOKEN stands for any input.
ONE_TOKEN = PoolingInput((0,))
# _SAMPLES: inputs with which heads are tried.
_SAMPLES: Mapping[Task, PoolingInput] = {
    "classify": PoolingInput((0,), "classify"),
    "token_classify": PoolingInput((0,), "token_classify"),
    "mlm": PoolingInput((0,), "mlm", places=(0,)),
}


class AdaptedEncoder(PoolingRunner):
    """A pooling model's runner that takes adapters.

    Attributes:
        adapters: the part that puts adapters into slots.
    """

    adapters: EncoderAdapters
    _info: PoolingInfo
    _modules: Sequence[nn.Module]

    @property
    def info(self) -> PoolingInfo:
        """Facts about the loaded model."""
        return self._info

    @override
    def begin(
        self, inputs: Sequence[PoolingInput], slots: Mapping[str, int] = NO_SLOTS
    ) -> StagedJob:
        return self.adapters.job(inputs, slots)

    def run(self, inputs: Sequence[PoolingInput]) -> list[np.ndarray]:
        """Return the results of a batch, computed without a break."""
        return self.begin(inputs).wait()

    @override
    def release(self) -> None:
        # A reference cycle may keep modules alive for a while, but then without arrays.
        for module in self._modules:
            module.clear()
        self.adapters.close()
        give_back_memory()


@dataclass(frozen=True, slots=True)
class _Own:
    """An adapter's own heads, and the tasks that they do."""

    heads: EncoderHeads
    tasks: tuple[Task, ...]


class EncoderAdapters(SlotTarget):
    """Runs batches in which each input has its own adapter, or none.

    Implements ``adapter_store.SlotTarget``. Inputs share a forward, and each adapter's own head
    takes its rows of the hidden states.
    """

    def __init__(
        self,
        model: nn.Module,
        heads: EncoderHeads,
        maker: HeadMaker,
        forward: Forward,
        *,
        tasks: Sequence[Task],
        dtype: str,
        shapes: ForwardShapes,
        config: Mapping[str, Any],
    ) -> None:
        """Wrap the layers of a model, so that they take adapters.

        Args:
            model: the model with the layers that adapters change.
            heads: the model's own heads.
            maker: makes the heads that adapters bring.
            forward: computes what comes before the heads.
            tasks: the model's tasks without an adapter.
            dtype: the model's dtype.
            shapes: the shapes that forwards may have.
            config: the checkpoint's config.json.
        """
        self._model = model
        self._shapes = shapes
        self._modules = dict(model.named_modules())
        self._heads = heads
        self._maker = maker
        self._forward = forward
        self._tasks = tasks
        self._stages = LayerStages(model)
        self._context = AdapterContext()
        self._layers = AdaptedLayers(model, product_dtype(dtype), self._context, config=config)
        # The heads that adapters bring, by slot.
        self._own: dict[int, _Own] = {}
        # Slots of adapters that change results shared by all rows of a forward.
        self._apart: set[int] = set()

    @property
    @override
    def num_bytes(self) -> int:
        return self._layers.num_bytes

    @override
    def of_model(self, adapter: AdapterWeights, *, param: str) -> AdapterWeights:
        return self._layers.of_model(adapter, param=param)

    def of_checkpoint(self, adapter: AdapterWeights) -> AdapterWeights:
        """See ``TrainedModel``."""
        return self._layers.of_checkpoint(adapter)

    @override
    def check(self, adapter: AdapterWeights, *, param: str) -> OwnHead | None:
        self._layers.check(replace(adapter, saved={}), param=param)
        own = self._own_head(adapter, param)
        if own is None:
            return None
        hidden, mask = self._forward([ONE_TOKEN])
        samples = [_SAMPLES[task] for task in own.tasks if task in _SAMPLES]
        try:
            # The graph alone gives the shapes; nothing is evaluated.
            sizes = [own.heads.run([sample], hidden, mask)[0].shape[-1] for sample in samples]
        except MODEL_ERRORS as cause:
            raise unfit_error(f"its head cannot be run: {cause}", param) from cause
        is_of_labels = not LABEL_TASKS.isdisjoint(own.tasks)
        return OwnHead(own.tasks, max(sizes) if is_of_labels else 0)

    @override
    def begin(self, slot: int, adapter: AdapterWeights, *, param: str) -> None:
        own = self._own_head(adapter, param)
        self._own.pop(slot, None)
        self._layers.begin(slot, replace(adapter, saved={}), param=param)
        if own is not None:
            self._own[slot] = own
        if self._changed(adapter, param) & self._calls.shared:
            self._apart.add(slot)
        else:
            self._apart.discard(slot)

    @override
    def put_modules(self, slot: int, count: int) -> bool:
        return self._layers.put_modules(slot, count)

    @override
    def drop(self, slot: int) -> None:
        self._layers.drop(slot)
        self._own.pop(slot, None)
        self._apart.discard(slot)

    @override
    def refresh(self) -> None:
        self._layers.refresh()

    def close(self) -> None:
        """Drop the model's arrays, because it is unloaded; the store may outlive it."""
        self._heads.release()

    def job(self, inputs: Sequence[PoolingInput], slots: Mapping[str, int]) -> StagedJob:
        """Return a batch of which nothing is computed yet.

        ``slots`` maps the content of each adapter that inputs name to its slot. The slots may be
        reused as soon as this returns.
        """
        own = np.array(
            [NO_ADAPTER if item.adapter is None else slots[item.adapter] for item in inputs],
            np.int32,
        )
        results: list[mx.array | None] = [None] * len(inputs)
        with self._stages.recorded() as outputs:
            for rows in self._forwards(own):
                group = [inputs[row] for row in rows]
                hidden, mask = self._hidden(inputs, self._shapes.rows(rows), own)
                answers = self._results(group, own[rows], hidden[: len(rows)], mask[: len(rows)])
                for row, result in zip(rows, answers, strict=True):
                    results[row] = result
        return StagedJob(outputs, [result for result in results if result is not None])

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The modules of the model, by path."""
        return self._modules

    @property
    def parameters(self) -> Mapping[str, mx.array]:
        """The parameters of the model, by name."""
        return parameters_of(self._model)

    @property
    def shared(self) -> Collection[str]:
        """Return the paths of modules whose result all rows of a forward share."""
        return self._calls.shared

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers of the model, in order."""
        return self._stages.layers

    @property
    def head(self) -> TrainableHead | None:
        """The model's classification head as it is now; None if it has none."""
        return self._maker.trainable()

    def new_head(self, seed: int) -> TrainableHead | None:
        """See ``TrainedModel``."""
        return self._maker.new(seed)

    @property
    def shares_prompts(self) -> bool:
        """False: encoders do not continue prompts."""
        return False

    def texts(self, item: TrainingInput) -> Sequence[PoolingInput]:
        """Return what the layers read for an input; equal texts have equal hidden states."""
        (text,) = _texts([item])
        return [
            PoolingInput(
                text.token_ids, second_at=text.second_at, num_unattended=text.num_unattended
            )
        ]

    def run_layers(self, text: TrainedText) -> None:
        """Build the forward of one text, without any adapter and without a head."""
        self._forward(_texts([text]))

    def length(self, inputs: Sequence[TrainedText]) -> int:
        """Return the length L of a forward of these inputs."""
        return self._shapes.length(max(len(item.token_ids) for item in inputs))

    def changed_by(self, stacks: Mapping[str, AdapterStack]) -> AbstractContextManager[None]:
        """Let stacks change layers that are called in the context; a forward has wrapped them."""
        return self._context.changed_by(stacks)

    def changed_job(
        self,
        inputs: Sequence[TrainingInput],
        stacks: Mapping[str, AdapterStack],
        first_layer: int = 0,
        heads: Sequence[Any] = (),
    ) -> StagedJob:
        """Return a batch that given stacks change, in place of the adapters in slots.

        Args:
            inputs: name no adapters.
            stacks: the changes, by the paths of linear layers.
            first_layer: the first layer that is computed, whose output ends the first stage.
            heads: models whose heads take equal runs of rows; empty: the model's own takes all.
        """
        self._layers.wrap(stacks)
        with self._stages.recorded(first_layer) as outputs, self._context.changed_by(stacks):
            texts = _texts(inputs)
            hidden, mask = self._forward(texts)
            results: list[mx.array] = []
            every = [self._heads.with_model(model) for model in heads] or [self._heads]
            size = len(texts) // len(every)
            for begin, own in zip(range(0, len(texts), size), every, strict=True):
                rows = slice(begin, begin + size)
                results += own.run(texts[rows], hidden[rows], mask[rows])
        return StagedJob(outputs, results)

    def _hidden(
        self, inputs: Sequence[PoolingInput], rows: np.ndarray, own: np.ndarray
    ) -> tuple[mx.array, mx.array]:
        with self._context.during(AdapterRows.of_batch(own[rows])):
            return self._forward([inputs[row] for row in rows])

    def _forwards(self, own: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the rows of each forward: all rows, unless an adapter changes what rows share."""
        distinct = np.unique(own)
        if len(distinct) == 1 or self._apart.isdisjoint(distinct.tolist()):
            yield np.arange(len(own))
            return
        for slot in distinct:
            yield np.flatnonzero(own == slot)

    def _results(
        self, inputs: Sequence[PoolingInput], own: np.ndarray, hidden: mx.array, mask: mx.array
    ) -> list[mx.array]:
        """Return the results of the heads; an adapter with its own head gets its own rows."""
        groups: dict[tuple[int, bool], list[int]] = {}
        for row, (item, slot) in enumerate(zip(inputs, own.tolist(), strict=True)):
            has_own = slot in self._own and item.task in self._own[slot].tasks
            groups.setdefault((slot, has_own), []).append(row)
        results: list[mx.array] = [hidden] * len(inputs)
        for (slot, has_own), rows in groups.items():
            chosen = slice(None) if len(groups) == 1 else mx.array(rows)
            heads = self._own[slot].heads if has_own else self._heads
            with self._context.during(AdapterRows.of_batch(own[rows])):
                group = heads.run([inputs[row] for row in rows], hidden[chosen], mask[chosen])
            for row, result in zip(rows, group, strict=True):
                results[row] = result
        return results

    @functools.cached_property
    def _calls(self) -> TrunkCalls:
        return trunk_calls(self._model, lambda count: self._forward([ONE_TOKEN] * count))

    def _own_head(self, adapter: AdapterWeights, param: str) -> _Own | None:
        """Return the heads of an adapter that brings its own; None if it brings none."""
        if not adapter.saved:
            return None
        made = self._maker.make(adapter.saved, adapter.task_type, param=param)
        paths = set(made.paths)
        if inside := sorted(paths & self._calls.called):
            raise unfit_error(
                f"modules_to_save may have a head only; {inside[0]} comes before it", param
            )
        if both := sorted(paths & self._changed(adapter, param)):
            raise unfit_error(f"it both changes {both[0]} and replaces it", param)
        return _Own(self._heads.with_model(made.model), made.tasks or tuple(self._tasks))

    def _changed(self, adapter: AdapterWeights, param: str) -> set[str]:
        return {find_module(self._modules, path, param=param) for path in adapter.modules}


def _texts(inputs: Sequence[TrainingInput | TrainedText]) -> Sequence[PoolingInput]:
    assert all(isinstance(item, PoolingInput) for item in inputs), "encoders read texts"
    return cast("Sequence[PoolingInput]", inputs)


@dataclass(frozen=True, slots=True)
class TrunkCalls:
    """The layers of a model's trunk, by path.

    Attributes:
        called: layers that compute hidden states.
        shared: those of them with inputs that are not per row, such as DeBERTa's projections of
            relative positions or position embeddings: their outputs serve all rows.
    """

    called: frozenset[str]
    shared: frozenset[str]


def trunk_calls(model: nn.Module, run: Callable[[int], object]) -> TrunkCalls:
    """Return the layers that ``run`` calls; nothing is evaluated.

    ``run`` builds the forward of a number of inputs of one token each.
    """
    single, double = (_sizes(model, lambda count=count: run(count)) for count in (1, 2))
    shared = (path for path, size in single.items() if double[path] != 2 * size)
    return TrunkCalls(frozenset(single), frozenset(shared))


def _sizes(model: nn.Module, run: Callable[[], object]) -> Counter[str]:
    """Return the number of elements that each layer takes in a forward, by path."""
    sizes: Counter[str] = Counter()
    with ExitStack() as wrapped:
        for path, layer in model.named_modules():
            if not layer.children():
                # Each path has its own wrapping, because a layer may occur under two paths.
                counting = partial(_counting, path=path, sizes=sizes)
                wrapped.enter_context(WrappedCalls([layer], counting))
        run()
    return sizes


def _counting(original: Any, *, path: str, sizes: Counter[str]) -> Methods:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        sizes[path] += sum(arg.size for arg in args[:1] if isinstance(arg, mx.array))
        return original.__call__(self, *args, **kwargs)

    return {"__call__": call}
