"""Division of a process's one budget of KV memory among its models."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.step import KVPlan
from mlx_parallm.units import readable_bytes

logger = logging.getLogger(__name__)

# LEAST_BYTES: the bound on KV memory of small models, in bytes; also of large ones on a busy Mac,
# which can compress what other programs hold.
LEAST_BYTES = 1 << 30
# SNAPSHOTS, SNAPSHOT_SHARE: without a setting, a model keeps the states after so many prefixes, in
# at most one in so many bytes of its KV memory.
SNAPSHOTS, SNAPSHOT_SHARE = 64, 8
# UNUSED_SHARE, MOST_WEIGHTS: on a Mac, KV takes at most such a part of the memory that no program
# uses, and so many times the weights.
UNUSED_SHARE, MOST_WEIGHTS = 4, 16


@dataclass(frozen=True, slots=True)
class KVShare:
    """A model's share of the KV budget."""

    name: str
    plan: KVPlan
    num_blocks: int
    num_snapshots: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the blocks and snapshots."""
        return self.num_blocks * self.plan.block_bytes + self.snapshot_bytes

    @property
    def snapshot_bytes(self) -> int:
        """Memory of the snapshots."""
        return self.num_snapshots * self.plan.state_bytes

    def with_snapshots(self, limit: int | None) -> KVShare:
        """Return the share with a part of its memory for snapshots of at most ``limit``.

        Blocks of one full context stay, but an eighth of the memory may always be for snapshots:
        without any, no prefix is reused. See ``CacheConfig.state_cache_bytes`` for None.
        """
        plan, size, least = self.plan, self.plan.state_bytes, self.num_bytes // SNAPSHOT_SHARE
        if not size:
            return self
        if not plan.has_kv:
            # Its blocks take no memory.
            most = min(SNAPSHOTS * size if limit is None else limit, self.num_bytes)
            return replace(self, num_snapshots=most // size)
        most = min(SNAPSHOTS * size, least) if limit is None else limit
        spare = max(least, (self.num_blocks - plan.context_blocks) * plan.block_bytes)
        count = min(most, spare, (self.num_blocks - 1) * plan.block_bytes) // size
        blocks = -(-count * size // plan.block_bytes)
        return replace(self, num_blocks=self.num_blocks - blocks, num_snapshots=count)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_blocks * self.plan.block_size

    @property
    def context(self) -> int:
        """Longest sequence that can be served, in tokens."""
        return min(self.plan.max_model_len, self.num_tokens)

    @property
    def num_contexts(self) -> float:
        """Number of such sequences that fit."""
        return self.num_tokens / self.context

    @property
    def is_cut(self) -> bool:
        """True if the model's full context does not fit."""
        return self.context < self.plan.max_model_len

    def __str__(self) -> str:
        """Say what fits."""
        said = (
            f"{readable_bytes(self.num_bytes)} of KV: {self.num_blocks:,} blocks of "
            f"{self.plan.block_size} tokens, {self.num_tokens:,} tokens, "
            f"{self.num_contexts:,.1f} contexts of {self.context:,} tokens"
        )
        if self.is_cut:
            said += f" (cut from {self.plan.max_model_len:,})"
        if self.plan.state_bytes:
            said += (
                f"; {readable_bytes(self.snapshot_bytes)} of it for the states after "
                f"{self.num_snapshots} prefixes, of {readable_bytes(self.plan.state_bytes)} each"
            )
        return said


def least_bytes(context_bytes: int, block_bytes: int, state_bytes: int) -> int:
    """Return the bytes of KV with which a model serves its whole context.

    A part of them is for the states after prefixes, if the model has any, however few they are.
    """
    if not state_bytes:
        return context_bytes
    blocks = -(-context_bytes * SNAPSHOT_SHARE // (SNAPSHOT_SHARE - 1))
    return blocks + state_bytes + block_bytes


def most_bytes(
    backend: str, weight_bytes: int, unused_bytes: int | None, num_engines: int = 1
) -> int | None:
    """Return the most bytes of KV that suit a device, whatever is free; None if it has no bound.

    A pool takes its memory at the start, where the device's memory is that of the machine: the CPU
    fills it, and a Mac lacks it for other programs.

    Args:
        backend: "cpu", "metal" or "cuda".
        weight_bytes: the size of all weights.
        unused_bytes: memory that no program uses; None if unknown.
        num_engines: how many engines divide the device's memory.
    """
    if backend == "cuda":
        return None
    if backend == "cpu":
        return max(LEAST_BYTES, weight_bytes)
    bound = MOST_WEIGHTS * weight_bytes
    if unused_bytes is not None:
        bound = min(bound, unused_bytes // UNUSED_SHARE // num_engines)
    return max(LEAST_BYTES, bound)


def share_budget(plans: Sequence[KVPlan], budget: int, num_engines: int = 1) -> list[int]:
    """Return the number of blocks of each model; together they take at most ``budget`` bytes.

    Every model first gets one full context. Where the budget does not hold those, no model gets
    more bytes than another one that has less than its context. What is left is shared in
    proportion to what the models want beyond one context; a budget beyond all wants is used too.

    Args:
        plans: the models.
        budget: bytes of KV memory.
        num_engines: how many engines divide the memory of which the budget is a share.

    Raises:
        ConfigError: the budget does not hold one block of each model.
    """
    smallest = sum(plan.block_bytes for plan in plans)
    if smallest > budget:
        share = f", the share of one of {num_engines} engines (--data-parallel-size),"
        raise ConfigError(
            f"The KV memory of {readable_bytes(budget)}{share if num_engines > 1 else ''} "
            "does not hold one block of each model, "
            f"which takes {readable_bytes(smallest)}; raise --kv-cache-memory-bytes or "
            "--kv-memory-fraction, or lower --block-size."
        )
    blocks = _contexts(plans, budget)
    if any(count < plan.context_blocks for count, plan in zip(blocks, plans, strict=True)):
        return blocks
    left = budget - _bytes_of(blocks, plans)
    weights = [
        plan.wanted_bytes
        - plan.context_blocks * plan.block_bytes
        # Without KV the memory is for snapshots alone.
        + (0 if plan.has_kv else SNAPSHOTS * plan.state_bytes)
        for plan in plans
    ]
    if not any(weights):
        weights = [plan.wanted_bytes for plan in plans]
    total = sum(weights)
    return [
        count + left * weight // total // plan.block_bytes
        for count, weight, plan in zip(blocks, weights, plans, strict=True)
    ]


def report_cut(share: KVShare, max_model_len: int | None, num_engines: int) -> None:
    """Log that a model's context is cut to what its share of the KV memory holds.

    Args:
        share: the model's.
        max_model_len: the configured cap on its context; None if there is none.
        num_engines: how many engines divide the memory.

    Raises:
        ConfigError: engines divide the memory, and the whole context was configured.
    """
    advice = "raise --kv-cache-memory-bytes or --kv-memory-fraction"
    if num_engines > 1:
        advice += " or lower --data-parallel-size, because engines divide that memory"
        if max_model_len == share.plan.max_model_len:
            raise ConfigError(
                f"--max-model-len of {share.name} is {max_model_len}, and the KV memory of each "
                f"engine holds {share.context} tokens; {advice}."
            )
    logger.warning(
        "%s: the context is cut from %d to %d tokens, which is what fits in its share of the KV "
        "memory; %s.",
        share.name,
        share.plan.max_model_len,
        share.context,
        advice,
    )


def _contexts(plans: Sequence[KVPlan], budget: int) -> list[int]:
    """Return the blocks of one context of each model, or as much of them as the budget holds."""

    def up_to(level: int) -> list[int]:
        """Return each model's blocks if none has more than ``level`` bytes, except its first."""
        return [min(plan.context_blocks, max(1, level // plan.block_bytes)) for plan in plans]

    # The largest level that the budget pays for.
    level = bisect.bisect_right(
        range(budget + 1), budget, key=lambda level: _bytes_of(up_to(level), plans)
    )
    return up_to(level - 1)


def _bytes_of(blocks: Sequence[int], plans: Sequence[KVPlan]) -> int:
    return sum(count * plan.block_bytes for count, plan in zip(blocks, plans, strict=True))
