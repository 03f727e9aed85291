"""Runs scheduled batches of one model: forward, LM head, sampling, one evaluation a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx

from mlx_parallm.attention.reference import ReferenceAttention
from mlx_parallm.batch import RunnerInfo, ScheduledBatch, ScheduledSequence, StepOutput
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.runner.cache_layout import CacheLayout
from mlx_parallm.runner.loader import LoadedModel
from mlx_parallm.runner.memory import KVPlan, config_value
from mlx_parallm.runner.path_choice import choose_path
from mlx_parallm.runner.paths.alone import AlonePath
from mlx_parallm.runner.row_selection import embedding_rows
from mlx_parallm.sampling.logprobs import TargetLogprobs, target_logprobs
from mlx_parallm.sampling.sampler import Sampler, SampleResult

logger = logging.getLogger(__name__)


class ModelRunner:
    """Implements ``batch.Runner``. Every call must come from the thread that loaded the model."""

    def __init__(
        self,
        loaded: LoadedModel,
        layouts: tuple[CacheLayout, ...],
        plan: KVPlan,
        num_blocks: int,
    ) -> None:
        self._sampler = Sampler()
        vocab_size = embedding_rows(loaded.model, config_value(loaded.config, "vocab_size"))
        if vocab_size is None:
            raise ModelLoadError(f"{loaded.path} has no embedding table.")
        backend = ReferenceAttention(plan.block_size)
        choice = choose_path(
            loaded.model,
            layouts,
            backend,
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            block_size=plan.block_size,
            dtype=loaded.dtype,
        )
        self._path = choice.path
        if self._path.name in {"sequential", "alone"}:
            logger.warning("%s computes one sequence at a time", loaded.path.name)
        kv_bytes = 0 if isinstance(self._path, AlonePath) else num_blocks * plan.block_bytes
        self._info = RunnerInfo(
            path=self._path.name,
            vocab_size=vocab_size,
            max_model_len=min(plan.max_model_len, num_blocks * plan.block_size),
            num_blocks=num_blocks,
            block_size=plan.block_size,
            kv_bytes=kv_bytes,
            weight_bytes=loaded.weight_bytes,
            has_state=self._path.has_state,
            attention_backend=backend.name,
            dtype=loaded.dtype,
        )

    @property
    def info(self) -> RunnerInfo:
        """Facts about the loaded model."""
        return self._info

    def run(self, batch: ScheduledBatch) -> StepOutput:
        """Run one step and wait for its result.

        Waiting matters: MLX writes a pool in place only while no step in flight holds it.
        """
        self._path.copy_blocks(batch.block_copies)
        self._path.copy_state(batch.state_copies)
        rows = StepRows(batch.sequences)
        logits = self._path.logits(batch.sequences, rows.wanted)
        sampled = self._sample(logits, rows)
        scored = self._score(logits, rows)
        outputs = [array for result in scored.values() for array in result.arrays()]
        if sampled is not None:
            outputs += sampled.arrays()
        mx.eval(outputs, self._path.arrays())
        return StepOutput(
            tokens=sampled.to_python(rows.sampled_ids) if sampled is not None else (),
            prompt_logprobs={seq_id: result.to_python() for seq_id, result in scored.items()},
        )

    def _sample(self, logits: mx.array, rows: StepRows) -> SampleResult | None:
        if not rows.sampled:
            return None
        if len(rows.sampled) < len(rows.wanted):
            logits = logits[mx.array(rows.sampled)]
        return self._sampler(logits, rows.specs)

    def _score(self, logits: mx.array, rows: StepRows) -> dict[int, TargetLogprobs]:
        return {
            one.seq_id: target_logprobs(
                logits[first : first + len(one.target_ids)],
                one.target_ids,
                one.prompt_logprobs or 0,
            )
            for one, first in rows.scored
        }


class StepRows:
    """Which of a step's tokens need logits, and where they are among those.

    Attributes:
        wanted: ascending indices into the concatenation of all tokens.
        sampled: places in ``wanted`` of the rows to sample, for which ``specs``
            and ``sampled_ids`` are.
        scored: sequences whose prompt is scored, and the place of their first row in ``wanted``.
    """

    def __init__(self, sequences: Sequence[ScheduledSequence]) -> None:
        self.wanted: list[int] = []
        self.sampled: list[int] = []
        self.specs = [one.sample for one in sequences if one.sample is not None]
        self.sampled_ids = [one.seq_id for one in sequences if one.sample is not None]
        self.scored: list[tuple[ScheduledSequence, int]] = []
        first = 0
        for one in sequences:
            length = len(one.token_ids)
            if one.target_ids:
                self.scored.append((one, len(self.wanted)))
                self.wanted += range(first, first + len(one.target_ids))
            if one.sample is not None:
                # The row may be wanted already, when its target is scored too.
                if len(one.target_ids) < length:
                    self.wanted.append(first + length - 1)
                self.sampled.append(len(self.wanted) - 1)
            first += length
