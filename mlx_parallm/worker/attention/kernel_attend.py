"""The decode kernel: rows attend over their block tables, in items that may be merged."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.kernel import PROCESSORS, Kernel, Residency
from mlx_parallm.kernels.language import Tuning
from mlx_parallm.worker.attention.base import Scores
from mlx_parallm.worker.attention.decode_plan import DecodePlan
from mlx_parallm.worker.attention.kernel_plan import Division, KernelPlan, Work
from mlx_parallm.worker.attention.kernel_pool import VECTOR, WARP, KernelPool, PoolLayout, lanes_for

LOG2_E = math.log2(math.e)

# TILE_BITS: size of the keys of a tile, 32 registers of each lane.
TILE_BITS = WARP * 32 * 32
# TENSOR_DIMS: sizes of keys and values, TENSOR_KEYS keys of a tile, and TENSOR_HEADS query heads of
# the kernel for tensor cores.
TENSOR_DIMS = (64, 128)
TENSOR_KEYS = 16
TENSOR_HEADS = 8
# TENSOR_THREADGROUPS: two of 128 threads on each processor, whose loads are as many as the memory
# takes. LEAST_KEYS of an item: with fewer, to merge takes longer than it saves.
TENSOR_THREADGROUPS = 2 * PROCESSORS
LEAST_KEYS = 512
# MANY_WARPS of a threadgroup where a processor has one threadgroup at most: tiles of a row follow
# each other in a warp, and each takes a microsecond. Registers leave room for one such threadgroup.
# MAX_SUMS: bytes of the warps' sums in shared memory.
MANY_WARPS = 12
MAX_SUMS = 40 << 10
_INPUTS = ("queries", "items", "tables", "previous")
_PARTS = ("part_sums", "part_stats")


@dataclass(frozen=True, slots=True)
class AttendKind:
    """Everything that an attention kernel is compiled for."""

    layout: PoolLayout
    heads: int
    scale: float
    soft_cap: float | None
    has_sinks: bool
    has_bias: bool
    tuning: Tuning

    @property
    def share(self) -> int:
        """Return the query heads of one KV head."""
        return self.heads // self.layout.shape.num_kv_heads

    @property
    def parts(self) -> int:
        """Return the threadgroups that share a KV head's query heads."""
        return -(-self.share // self.tuning.max_heads)

    @property
    def heads_per_item(self) -> int:
        """Return the threadgroups per item."""
        return self.layout.shape.num_kv_heads * self.parts

    @property
    def vector(self) -> int:
        """Return how many neighbouring numbers of a head a lane takes at once."""
        layout, wide = self.layout, self.tuning.quantised_vector
        quantisation = layout.quantisation
        dims = (layout.shape.key_dim, layout.shape.value_dim)
        if (
            quantisation is None
            or quantisation.group_size % wide
            or any(dim % wide for dim in dims)
        ):
            return VECTOR
        return wide

    @property
    def tile(self) -> int:
        """Return the keys that a warp takes at once: a power of two that divides a block.

        A lane's share of them stays in registers.
        """
        layout = self.layout
        bits = layout.quantisation.bits if layout.quantisation else layout.shape.dtype.size * 8
        keys = min(self.tuning.tile, TILE_BITS // (bits * layout.shape.key_dim))
        keys = 1 << (max(keys, 1).bit_length() - 1)
        return math.gcd(keys, layout.block_size)

    @property
    def many_warps(self) -> int:
        """Return the warps of a tensor-core threadgroup where there are few threadgroups."""
        sums = -(-self.share // self.parts) * self.layout.shape.value_dim * mx.float32.size
        return max(min(MANY_WARPS, MAX_SUMS // sums), self.tuning.warps)

    @property
    def suits_tensor_cores(self) -> bool:
        """True if ``tensor_cores/decode.cu`` takes such layers."""
        layout, shape = self.layout, self.layout.shape
        return (
            layout.quantisation is None
            and shape.dtype in (mx.bfloat16, mx.float16)
            and layout.block_size % TENSOR_KEYS == 0
            and shape.key_dim in TENSOR_DIMS
            and shape.value_dim in TENSOR_DIMS
            and -(-self.share // self.parts) <= TENSOR_HEADS
            and not self.has_bias
        )


class AttendKernels:
    """The decode kernels of one kind."""

    def __init__(
        self, kind: AttendKind, builder: KernelBuilder, *, has_tensor_cores: bool = False
    ) -> None:
        self._kind = kind
        self._text, self._headers = "attend.metal", ("common.metal",)
        self._division = Division(kind.heads_per_item, kind.tuning.threadgroups)
        if has_tensor_cores and kind.suits_tensor_cores:
            self._text = "tensor_cores/decode.cu"
            self._headers = ("common.metal", "tensor_cores/tensor.cu")
            self._division = Division(
                kind.heads_per_item, min(TENSOR_THREADGROUPS, kind.tuning.threadgroups), LEAST_KEYS
            )
        # The warps of threadgroups: where there are many of these, and where there are few.
        self._warps = (kind.tuning.warps, kind.tuning.warps)
        if self._text != "attend.metal":
            self._warps = (kind.tuning.warps, kind.many_warps)
        self._builder = builder
        self._made: dict[tuple[str, int], Kernel] = {}
        self._is_prepared = False
        # These are needed by every layer of every step.
        self._per_item = kind.heads_per_item

    def begin(self) -> None:
        """Start to compile all kernels, in the background where the language allows it."""
        self._kernel("merge", self._warps[0])
        for warps in self._warps:
            self._kernel("attend", warps)
            self._kernel("split", warps)

    def prepare(self, pool: KernelPool) -> None:
        """Compile and run all kernels once; it takes seconds that streams would wait for later."""
        if self._is_prepared:
            return
        self._is_prepared = True
        self.begin()
        kind, shape = self._kind, self._kind.layout.shape
        queries = mx.zeros((1, kind.heads, 1, shape.key_dim), shape.dtype)
        sinks = mx.zeros((kind.heads,), shape.dtype) if kind.has_sinks else None
        bias = mx.zeros((kind.heads, 1)) if kind.has_bias else None
        scores = Scores(kind.scale, sinks=sinks, distance_bias=bias)
        item, table = mx.array([[0, 0, 0, 1, 0][: 4 + kind.has_bias]]), mx.array([[0]])
        works = (Work(item, None), Work(item, mx.array([[0, 1]])))
        mx.eval(
            [
                self._attend(pool, work, table, 1, queries, scores, warps)
                for warps in self._warps
                for work in works
            ]
        )

    def run(
        self,
        pool: KernelPool,
        plan: KernelPlan | DecodePlan,
        queries: mx.array,
        scores: Scores,
    ) -> mx.array:
        """Return the attention of the plan's short rows, ``[R, H, 1, V]``."""
        kind = self._kind
        work = plan.work(scores.window, self._division, kind.has_bias)
        many, few = self._warps
        warps = few if work.items.shape[0] * self._per_item <= PROCESSORS else many
        return self._attend(pool, work, plan.tables, plan.num_rows, queries, scores, warps)

    def _attend(
        self,
        pool: KernelPool,
        work: Work,
        tables: mx.array,
        num_rows: int,
        queries: mx.array,
        scores: Scores,
        warps: int,
    ) -> mx.array:
        kind, shape = self._kind, self._kind.layout.shape
        bias = [] if scores.distance_bias is None else [scores.distance_bias]
        inputs = [queries, work.items, tables, pool.token, *pool.bound, *bias]
        sinks = [] if scores.sinks is None else [scores.sinks]
        output = (num_rows, kind.heads, 1, shape.value_dim)
        grid = work.items.shape[0] * self._per_item
        if work.spans is None:
            outputs = [(output, shape.dtype)]
            return self._launch("attend", [*inputs, *sinks], outputs, grid, warps)[0]
        rows = work.items.shape[0] * kind.heads
        parts = [((rows, shape.value_dim), mx.float32), ((rows, 2), mx.float32)]
        sums, stats = self._launch("split", inputs, parts, grid, warps)
        return self.merge([sums, stats, work.spans, *sinks], output)

    def merge(self, inputs: list[mx.array], output: tuple[int, ...]) -> mx.array:
        """Merge ``inputs``: sums ``[P * H, V]``, stats ``[P * H, 2]``, spans, and sinks, if any."""
        outputs = [(output, self._kind.layout.shape.dtype)]
        grid = output[0] * self._kind.heads
        return self._launch("merge", inputs, outputs, grid, self._warps[0])[0]

    def _launch(
        self,
        name: str,
        inputs: list[mx.array],
        outputs: list[tuple[tuple[int, ...], mx.Dtype]],
        threadgroups: int,
        warps: int,
    ) -> list[mx.array]:
        return self._kernel(name, warps)(
            inputs=inputs,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            grid=(threadgroups * warps * WARP, 1, 1),
            threadgroup=(warps * WARP, 1, 1),
        )

    def _kernel(self, name: str, warps: int) -> Kernel:
        key = name, warps
        kernel = self._made.get(key)
        if kernel is None:
            kernel = self._made[key] = self._builder.kernel(self._spec(*key), self._constants(*key))
        return kernel

    def _spec(self, name: str, warps: int) -> KernelSpec:
        sinks = ("sinks",) if self._kind.has_sinks else ()
        bias = ("bias",) if self._kind.has_bias else ()
        inputs = (*_INPUTS, *self._kind.layout.pools, *bias)
        # A thread of a large threadgroup has fewer registers than the compiler would give it.
        residency = None if warps == self._warps[0] else Residency(0, warps * WARP)
        if name == "split":
            return KernelSpec(self._text, inputs, _PARTS, self._headers, residency=residency)
        if name == "merge":
            return KernelSpec("merge.metal", (*_PARTS, "spans", *sinks), ("output",))
        inputs = (*inputs, *sinks)
        return KernelSpec(self._text, inputs, ("output",), self._headers, residency=residency)

    def _constants(self, name: str, warps: int) -> dict[str, Constant]:
        kind, layout = self._kind, self._kind.layout
        return {
            "T": layout.shape.dtype,
            **layout.constants(),
            "HEADS": kind.heads,
            "SHARE": kind.share,
            "PARTS": kind.parts,
            "G": -(-kind.share // kind.parts),
            "VEC": kind.vector,
            "TILE": kind.tile,
            "SCORE_LANES": max(kind.tuning.score_lanes, WARP // kind.tile),
            "VALUE_LANES": lanes_for(layout.shape.value_dim, kind.vector),
            "WARPS": warps,
            "SPLIT": name == "split",
            "SINKS": kind.has_sinks,
            "BIAS": kind.has_bias,
            **score_constants(kind.scale, kind.soft_cap),
        }


def score_constants(scale: float, soft_cap: float | None) -> dict[str, Constant]:
    """Return the constants that turn products of queries and keys into exponents of two."""
    return {
        "SOFT_CAP": soft_cap is not None,
        "QUERY_SCALE": scale * LOG2_E if soft_cap is None else scale / soft_cap,
        "CAP_SCALE": 1.0 if soft_cap is None else soft_cap * LOG2_E,
        "LOG2_E": LOG2_E,
    }
