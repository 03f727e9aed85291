"""Computes sources of an encoder-decoder: their cross-attention KV, in blocks of the pools."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import compress
from weakref import WeakSet

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.models.seq2seq.interface import EncoderDecoder, EncoderStages, SourceKV
from mlx_parallm.types.model_input import TOKEN_IDS, SourcePlace
from mlx_parallm.types.step import ScheduledSequence, SourceTable
from mlx_parallm.worker.generation.paths.packed import PackedPath
from mlx_parallm.worker.lora.adapter_store import AdapterStore
from mlx_parallm.worker.lora.rows import AdapterRows
from mlx_parallm.worker.ops import Pending

Tensors = Mapping[str, HostTensor]
# NOT_FINITE: why a request fails whose source the model cannot encode.
NOT_FINITE = "The model's encoder returns numbers that are infinite or NaN for this source."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """The order of runs among the steps of a model.

    Attributes:
        recovering: returns a context that drops what a failed stage left.
        before_writes: waits for the step in flight if it may read these blocks, which are written
            next.
        compute: computes arrays, or begins to if steps run ahead.
    """

    recovering: Callable[[], AbstractContextManager[None]]
    before_writes: Callable[[Iterable[int]], None]
    compute: Callable[..., None]


class SourceDoubts:
    """Which sources in KV blocks may have numbers that are not finite.

    Their blocks have zeros instead, because others that get the blocks later read what is beyond
    their own tokens, with a weight of zero. A source is known by its first block.
    """

    def __init__(self) -> None:
        self._is_bad: dict[int, mx.array] = {}

    def note(self, sources: Iterable[SourceTable], is_bad: Iterable[mx.array]) -> None:
        """Note sources that are written, each with a lazy bool ``[]``: True if it is bad."""
        self._is_bad.update(
            (source.block_table[0], each) for source, each in zip(sources, is_bad, strict=True)
        )

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget the sources in blocks that are written with KV which was found finite before."""
        for block in blocks if self._is_bad else ():
            self._is_bad.pop(block, None)

    def of(self, sequences: Iterable[ScheduledSequence]) -> dict[int, tuple[int, mx.array]]:
        """Return what is not known yet of the sources of sequences, by their ids."""
        if not self._is_bad:
            return {}
        firsts = {
            sequence.seq_id: sequence.source.block_table[0]
            for sequence in sequences
            if sequence.source is not None
        }
        return {
            seq_id: (first, self._is_bad[first])
            for seq_id, first in firsts.items()
            if first in self._is_bad
        }

    def failed(self, doubts: Mapping[int, tuple[int, mx.array]]) -> dict[int, str]:
        """Return the sequences whose source is bad by computed ``doubts``; forget the others."""
        failed: dict[int, str] = {}
        for seq_id, (first, is_bad) in doubts.items():
            if is_bad.item():
                failed[seq_id] = NOT_FINITE
            elif self._is_bad.get(first) is is_bad:
                del self._is_bad[first]
        return failed


class SourceEncoder:
    """Encodes the sources of one model and writes their cross-attention KV.

    Sources of a run are packed rows: those of all its sources one after the other, each with its
    own adapter.

    Attributes:
        doubts: which sources may have failed.
    """

    def __init__(
        self,
        model: EncoderDecoder,
        path: PackedPath,
        adapters: AdapterStore,
        order: StepOrder,
    ) -> None:
        """Prepare.

        Args:
            model: the model.
            path: runs its decoder over the pools.
            adapters: those that runs may name.
            order: of the runs among the steps.
        """
        self.doubts = SourceDoubts()
        self._model = model
        self._path = path
        self._adapters = adapters
        self._order = order
        # The set is weak: a run that is abandoned is freed with the last reference to it.
        self._runs: WeakSet[SourceRun] = WeakSet()

    def begin(
        self, slots: Sequence[int], places: Sequence[SourcePlace], sources: Sequence[Tensors]
    ) -> Pending[None]:
        """Begin to compute sources together.

        Args:
            slots: by which ``drop`` calls them.
            places: where their KV goes.
            sources: their arrays.
        """
        assert places, "sources have places"
        self.drop(slots)
        arrays = [{name: to_mlx(tensor) for name, tensor in each.items()} for each in sources]
        stages = self._model.encode(arrays)
        lengths = _lengths_of(arrays)
        run = SourceRun(self, dict(zip(slots, places, strict=True)), stages, lengths)
        self._runs.add(run)
        return run

    @property
    def num_stages(self) -> int:
        """The stages of a run."""
        return self._model.num_encoder_stages

    def drop(self, slots: Collection[int]) -> None:
        """Let runs in progress write nothing for some slots: their blocks may have other owners."""
        for run in list(self._runs):
            run.drop(slots)

    def clear(self) -> None:
        """Let runs in progress write nothing."""
        for run in list(self._runs):
            run.drop(run.slots)
        self.doubts = SourceDoubts()

    def compute(
        self, stages: EncoderStages, places: Iterable[SourcePlace], rows: AdapterRows | None
    ) -> list[SourceKV] | None:
        """Compute the next of some stages; return the cross-attention KV, lazily, after the last.

        Args:
            stages: of sources in these places.
            places: whose adapters are put into their slots, if they are not there.
            rows: the adapters of the sources' rows.
        """
        adapters = {place.adapter_slot: place.adapter for place in places}
        with self._order.recovering():
            self._adapters.place({slot: name for slot, name in adapters.items() if name})
            with self._path.adapters.during(rows):
                try:
                    stage = next(stages)
                except StopIteration as end:
                    return end.value
            self._order.compute(stage)
            return None

    def write(self, sources: Sequence[SourceTable], layers: Iterable[SourceKV]) -> None:
        """Write cross-attention KV of sources into their blocks."""
        is_bad: list[mx.array] = []

        def finite() -> Iterator[SourceKV]:
            for keys, values in layers:
                bad = ~(_is_finite(keys) & _is_finite(values))
                is_bad.append(bad.reshape(-1))
                yield mx.where(bad, 0, keys), mx.where(bad, 0, values)

        with self._order.recovering():
            self._order.before_writes(block for each in sources for block in each.block_table)
            self._path.write_sources(sources, finite())
            ends = np.cumsum([source.num_tokens for source in sources])
            rows = mx.stack(is_bad).any(axis=0)
            own = [part.any() for part in mx.split(rows, ends[:-1].tolist())]
            self.doubts.note(sources, own)
            self._order.compute(*self._path.arrays(), *own)


class SourceRun:
    """Sources that are being computed. Implements ``Pending``.

    Attributes:
        num_stages: stages that are left.
    """

    def __init__(
        self,
        encoder: SourceEncoder,
        places: Mapping[int, SourcePlace],
        stages: EncoderStages,
        lengths: Sequence[int] | None,
    ) -> None:
        """Compute ``stages`` of sources that go to ``places``, by their slots.

        ``lengths`` are their numbers of positions; None if all are equal, and not known yet.
        """
        self.num_stages = encoder.num_stages
        self._encoder = encoder
        self._places = places
        self._dropped: set[int] = set()
        self._stages: EncoderStages | None = stages
        self._lengths = lengths
        slots = np.array([place.adapter_slot for place in places.values()], dtype=np.int32)
        self._rows = AdapterRows.of_batch(slots if lengths is None else slots.repeat(lengths))

    @property
    def slots(self) -> Collection[int]:
        """The slots of its sources."""
        return self._places.keys()

    def advance(self) -> None:
        """See ``Pending``."""
        assert self.num_stages > 1, "the last stage is computed by wait"
        layers = self._compute()
        assert layers is None, "the encoder has fewer stages than it says"

    def wait(self) -> None:
        """Compute what is left; nothing waits for the device if steps run ahead."""
        while self.num_stages > 1:
            self.advance()
        if self._stages is None:
            return
        layers = self._compute()
        assert layers is not None, "the encoder has more stages than it says"
        self._stages = None
        self._write(layers)

    def _compute(self) -> list[SourceKV] | None:
        self.num_stages -= 1
        if self._stages is None:
            return None
        stages, self._stages = self._stages, None
        # The adapter of a dropped source may have been unloaded: its rows mean nothing any more.
        places = [each for slot, each in self._places.items() if slot not in self._dropped]
        # If the stage fails, nothing of the run is kept.
        layers = self._encoder.compute(stages, places, self._rows)
        self._stages = stages
        return layers

    def _write(self, layers: list[SourceKV]) -> None:
        lengths = self._lengths
        if lengths is None:
            count = len(self._places)
            lengths = [layers[0][0].shape[0] // count] * count
        sources = [
            SourceTable(block_table=place.block_table, num_tokens=length)
            for place, length in zip(self._places.values(), lengths, strict=True)
        ]
        # No reference is kept to what is written, so that a layer is freed before the next one.
        written = (layers.pop(0) for _ in range(len(layers)))
        if self._dropped:
            is_kept = [slot not in self._dropped for slot in self._places]
            sources = list(compress(sources, is_kept))
            rows = mx.array(np.flatnonzero(np.repeat(is_kept, lengths)).astype(np.int32))
            written = ((keys[rows], values[rows]) for keys, values in written)
        self._encoder.write(sources, written)

    def drop(self, slots: Collection[int]) -> None:
        """Write nothing for these slots; a run of which nothing is left computes nothing more."""
        self._dropped.update(slots)
        if self._dropped >= self._places.keys():
            self._stages = None


def _lengths_of(sources: Sequence[Mapping[str, mx.array]]) -> list[int] | None:
    """Return the lengths of texts; None for other sources, all of one length in a run."""
    ids = [source.get(TOKEN_IDS) for source in sources]
    if lengths := [each.size for each in ids if each is not None]:
        assert len(lengths) == len(sources), "texts and other sources are in one run"
        return lengths
    shapes = [{name: array.shape for name, array in source.items()} for source in sources]
    assert all(each == shapes[0] for each in shapes), "sources that are no texts have equal shapes"
    return None


def _is_finite(rows: mx.array) -> mx.array:
    """Return for each of rows ``[T, K, 1, D]`` if all its numbers are finite, ``[T, 1, 1, 1]``."""
    return mx.isfinite(rows).all(axis=(1, 2, 3), keepdims=True)
