"""Ops: everything that the worker can be asked to do.

Ops are plain values: they can be pickled, name their model, and are applied in the order given.
Applied in the same order, with the same plans, they compute the same tokens in another worker. No
op reads a clock, and none computes otherwise for how much memory is free: numbers of blocks and
dtypes that depend on it are decided above the worker and part of the op. Ops that allocate weights
have no effect if there is too little: they raise OutOfMemoryError. Tensors go first, in pieces, and
ops name their handle.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

import numpy as np
from typing_extensions import override

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights
from mlx_parallm.types.content import Buffer
from mlx_parallm.types.model_input import InputKind, SourcePlace
from mlx_parallm.types.pooling import OwnHead, PoolingInput
from mlx_parallm.types.step import RunnerInfo, ScheduledBatch, StepOutput

if TYPE_CHECKING:
    from mlx_parallm.grammar.compiler import GrammarCompiler

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

#: ``PIECE_BYTES``: tensors that one ``PutTensors`` carries, unless a single one is larger.
PIECE_BYTES = 16 << 20


class Pending(Protocol[R_co]):
    """An op that was begun.

    Attributes:
        num_stages: stages that are left; ``wait`` is the last one.
    """

    @property
    def num_stages(self) -> int:
        """Return how many stages are left."""
        ...

    def advance(self) -> None:
        """Compute the next stage, which must not be the last."""
        ...

    def wait(self) -> R_co:
        """Compute the remaining stages and return the result, a plain value."""
        ...


class OneStage(Pending[R_co], Protocol[R_co]):
    """An op with one stage, which ``wait`` computes or waits for."""

    @property
    @override
    def num_stages(self) -> int:
        return 1

    @override
    def advance(self) -> None:
        raise AssertionError("the last stage is computed by wait")


@dataclass(frozen=True, slots=True)
class Done(OneStage[R_co]):
    """An op that was complete when ``begin`` returned."""

    result: R_co

    @override
    def wait(self) -> R_co:
        return self.result


class Stages(Pending[R]):
    """An op whose stages are the parts of a generator between its ``yield`` statements.

    Their number is not known before: ``num_stages`` is 2 until the generator has returned, then 1.
    """

    def __init__(self, parts: Generator[None, None, R]) -> None:
        """``parts`` returns the result."""
        self._parts = parts
        self._done: Done[R] | None = None

    @property
    @override
    def num_stages(self) -> int:
        return 2 if self._done is None else 1

    @override
    def advance(self) -> None:
        try:
            next(self._parts)
        except StopIteration as end:
            self._done = Done(end.value)

    @override
    def wait(self) -> R:
        while self._done is None:
            self.advance()
        return self._done.wait()


def at_once(
    stages: Callable[P, Generator[None, None, R]],
) -> Callable[P, R]:
    """Return a function that runs all stages of a generator's call and returns its result."""

    @wraps(stages)
    def whole(*args: P.args, **kwargs: P.kwargs) -> R:
        return Stages(stages(*args, **kwargs)).wait()

    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Op(Generic[R]):
    """An op whose result is an ``R``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Op[Any]):
    """Read a model's weights; return its plan, see the kind's ``plan`` module.

    Attributes:
        model: the name by which later ops call it.
        spec: what to load; its class says which loader does.
        plan: the plan of another worker's load, or what an earlier load chose, with which this one
            decides nothing; None to decide here what kernels and paths are used.
    """

    model: str
    spec: Any
    plan: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocate(Op[Any]):
    """Give a loaded model its KV pool and choose its path; return the completed plan.

    Attributes:
        model: the model.
        num_blocks: size of the pool.
        grammars: compiles those of constrained samples; a pickle of it compiles them anew.
        draft: a loaded model that proposes tokens, which is part of this one from now on.
    """

    model: str
    num_blocks: int
    grammars: GrammarCompiler | None = None
    draft: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Op[StepOutput]):
    """Run a batch of a model that generates.

    ``begin`` returns before the batch has ended, if the model runs ahead.
    """

    model: str
    batch: ScheduledBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBlocks(Op[tuple[Buffer, ...]]):
    """Return what KV blocks hold, a row of bytes for each, in all layers of the model.

    They are read as the steps that were begun before leave them. ``begin`` returns before the
    device has read them, if the model runs ahead; later ops change nothing of the result.
    Raises StepError if the model keeps no KV by block.

    Attributes:
        model: the model.
        blocks: their ids, at least one.
    """

    model: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBlocks(Op[None]):
    """Make KV blocks hold, bit for bit, what ``ReadBlocks`` returned.

    Steps that were begun before read what was there, later ones what is written. The bytes may come
    from another process, for a model of equal weights, settings and number of ranks with an equal
    ``AttentionBackend.block_layout``. Raises StepError if a row has another size than a block.

    Attributes:
        model: the model.
        blocks: their ids, at least one, each once.
        data: a row for each.
    """

    model: str
    blocks: tuple[int, ...]
    data: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStates(Op[tuple[Buffer, ...]]):
    """Return the states in some slots, a row of bytes for each: all arrays of all caches, in order.

    They are read as the steps that were begun before leave them, see ``ReadBlocks``. Raises
    StepError if the model keeps no state by slot, or a slot has none.

    Attributes:
        model: the model.
        slots: the slots, at least one.
    """

    model: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStates(Op[None]):
    """Make slots have, bit for bit, the states that ``ReadStates`` returned.

    The bytes may come from another process, as those of ``WriteBlocks``, for a model with an equal
    ``GenerationPlan.state_layout``. Raises StepError if a row has another size than a state.

    Attributes:
        model: the model.
        slots: the slots, at least one, each once.
        data: a row for each.
    """

    model: str
    slots: tuple[int, ...]
    data: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInputs(Op[None]):
    """Compute the products of inputs besides tokens; later steps name their slots, or blocks.

    ``begin`` computes nothing. Images and sources take ``RunnerInfo.num_tower_stages`` stages,
    other inputs one. A product whose slot is dropped meanwhile is not kept.

    Attributes:
        model: the model.
        slots: where features are kept, in place of what is there; sources have no features.
        kind: what the inputs are.
        handles: for each input, has its arrays by the names that its kind gives them. Several
            inputs have arrays of equal shapes, unless they are texts.
        places: for each source, where its KV goes. The last stage writes it: steps that were begun
            before read what was there, later ones what is written.
    """

    model: str
    slots: tuple[int, ...]
    kind: InputKind
    handles: tuple[str, ...]
    places: tuple[SourcePlace, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DropInputs(Op[None]):
    """Forget the products in some slots, computed or not; empty slots are ignored."""

    model: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBatch(Op[list[np.ndarray]]):
    """Run a batch of a pooling model; return one float32 array per input.

    Attributes:
        model: the model.
        inputs: of the batch.
        slots: the slot of every adapter that inputs name, by its content.
    """

    model: str
    inputs: Sequence[PoolingInput]
    slots: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActRows:
    """The choice of the actions of a batch's rows.

    Attributes:
        seeds: uint32 ``[rows, 2]``: a request's seed, and the row's place in the request.
        is_deterministic: bool ``[rows]``: True for the likeliest action.
        action_mask: bool ``[rows, choices]`` or ``[rows, time, choices]``; None: all are allowed.
        actions: actions to judge, for rows where ``is_judged``; None without any.
        is_judged: bool ``[rows]``; None without any.
    """

    seeds: np.ndarray
    is_deterministic: np.ndarray
    action_mask: np.ndarray | None = None
    actions: np.ndarray | None = None
    is_judged: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetOutputs:
    """The outputs of a ``NetBatch`` (or ``ActResult``'s) and its next states, by name."""

    outputs: Mapping[str, np.ndarray]
    states: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetBatch(Op[NetOutputs]):
    """Run a small net over rows, which have equally many times if they have any.

    Attributes:
        model: the model.
        inputs: by name, in the dtypes of the net's signature.
        states: before the first time, by name; None for zeros.
        episode_start: bool ``[rows, time]`` (``[rows]`` without time): where states are zeros
            again; None: nowhere.
        act: how actions are chosen; None for the outputs alone.
    """

    model: str
    inputs: Mapping[str, np.ndarray]
    states: Mapping[str, np.ndarray] | None = None
    episode_start: np.ndarray | None = None
    act: ActRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PutTensors(Op[None]):
    """Keep host tensors by name under a handle, beside those that it has already.

    Attributes:
        model: the model of the op that will name the handle.
        handle: the handle.
        tensors: the tensors by name.
    """

    model: str
    handle: str
    tensors: Mapping[str, HostTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropTensors(Op[None]):
    """Forget a handle and its tensors; unknown handles are ignored."""

    model: str
    handle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddAdapter(Op[OwnHead | None]):
    """Keep an adapter that later ops may name; return the head that it brings.

    Raises InvalidRequestError if it does not fit the model.

    Attributes:
        model: the model.
        content: an opaque id of what the adapter computes; equal ids compute the same.
        layout: the adapter without its tensors.
        handle: has the tensors, by the names that the layout gives.
    """

    model: str
    content: str
    layout: AdapterLayout
    handle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAdapter(Op[bool]):
    """Put the next part of an adapter into a slot; return True if there is more.

    ``part`` counts from 0. A batch that names a slot first puts the parts that are missing.
    """

    model: str
    content: str
    slot: int
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAdapter(Op[AdapterWeights]):
    """Return an adapter that is kept; raise ConflictError if it is not any more."""

    model: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropAdapter(Op[None]):
    """Forget an adapter that no later op names."""

    model: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareWeights(Op[str | None]):
    """Read and check new weights beside those in use; return why they are refused, None if not.

    Attributes:
        model: the model.
        folder: folder of a whole checkpoint; None for tensors.
        handle: handle of some of the model's tensors; None for a folder.
    """

    model: str
    folder: Path | None = None
    handle: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitWeights(Op[None]):
    """Compute with the prepared weights from now on; no step may be in flight."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPrepared(Op[None]):
    """Forget prepared weights, if there are any."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep(Op[None]):
    """Free a model's KV, its adapters on the device, and its weights.

    At level 1 the weights are kept in host memory if the device has its own.
    """

    model: str
    level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake(Op[bool]):
    """Restore "weights" or "kv_cache"; return True if weights were read from their folder."""

    model: str
    tag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Op[RunnerInfo]):
    """Allocate a model's KV pool anew with so many blocks, empty; return the facts with that.

    No step may be in flight. Raises OutOfMemoryError if there is no room: the pool is empty then,
    and as large as before.
    """

    model: str
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums(Op[dict[str, str]]):
    """Return the SHA-256 of each weight, in hex by name."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload(Op[None]):
    """Free a model's memory; unknown models are ignored."""

    model: str


def tensor_ops(model: str, handle: str, tensors: Mapping[str, HostTensor]) -> Iterator[PutTensors]:
    """Yield the ops that put tensors under a handle, in pieces of ``PIECE_BYTES``."""
    piece: dict[str, HostTensor] = {}
    for name, tensor in tensors.items():
        num_bytes = sum(other.nbytes for other in piece.values())
        if piece and num_bytes + tensor.nbytes > PIECE_BYTES:
            yield PutTensors(model=model, handle=handle, tensors=piece)
            piece = {}
        piece[name] = tensor
    yield PutTensors(model=model, handle=handle, tensors=piece)
