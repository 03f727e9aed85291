"""Compares chains with their products alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.worker.device.kernel_trial import largest_error
from mlx_parallm.worker.layers.packed_kernel import PackedKernels
from mlx_parallm.worker.layers.product_chain import Chain, Link

# TURNS: launches of a trial. Each has another input: a threadgroup that does not wait reads what
# is left of another one.
TURNS = 4


@dataclass(frozen=True, slots=True)
class ChainTrial:
    """A chain and its products alone, which compute the same numbers to the last bit.

    Attributes:
        kernels: of packed weights.
        chain: the products.
    """

    kernels: PackedKernels
    chain: Chain

    def largest_error(self, turns: int = TURNS) -> float:
        """Return the largest difference of the last outputs; 0.0 for none, as there should be."""
        weights: list[list[mx.array]] = []
        for number in range(len(self.chain.links)):
            weights.append(self._weights(number))
            # One after the other: before it is packed, a weight takes several times its memory.
            mx.eval(weights[-1])
        pairs: list[tuple[mx.array, mx.array]] = []
        for turn in range(turns):
            keys = mx.random.split(mx.random.key(turn), 2)
            first, dtype = self.chain.links[0], self.chain.form.dtype
            x = mx.random.normal((1, 1, first.variant.depth), dtype, key=keys[0])
            hidden = mx.random.normal((1, 1, first.outputs), dtype, key=keys[1])
            counts = mx.zeros(self.chain.counts, mx.uint32)
            together = self.kernels.chained(self.chain, x, hidden, weights, counts)
            pairs.append((together, self._alone(x, hidden, weights)))
        mx.eval(pairs)
        return max(largest_error(together, alone) for together, alone in pairs)

    def _weights(self, number: int) -> list[mx.array]:
        """Return the weights of a product: its arrays, and that of the norm before it."""
        link, form = self.chain.links[number], self.chain.form
        keys = mx.random.split(mx.random.key(1000 + number), 2)
        shape, packing = (link.width, link.variant.depth), form.packing
        weight = mx.random.normal(shape, form.dtype, key=keys[0]) * link.variant.depth**-0.5
        arrays = packing.packed(weight)
        gain = mx.random.normal((link.variant.depth,), form.dtype, key=keys[1])
        return [*arrays, gain] if link.around.epsilon is not None else [*arrays]

    def _alone(
        self, x: mx.array, hidden: mx.array, weights: Sequence[Sequence[mx.array]]
    ) -> mx.array:
        for link, own in zip(self.chain.links, weights, strict=True):
            x = self._product(link, x, hidden, own)
            if link.around.adds:
                hidden = x
        return x

    def _product(
        self, link: Link, x: mx.array, hidden: mx.array, weights: Sequence[mx.array]
    ) -> mx.array:
        packing, around = self.chain.form.packing, link.around
        count = len(packing.names)
        others = [*weights[count:], *([hidden] if around.adds else [])]
        return self.kernels.product(x, weights[:count], packing, link.variant, around, others)
