"""Runs the same ops in every rank of a model, or in one process, and keeps their results.

``python -m tests.cluster.sharded_ops OUTPUT SCENARIO=FOLDER...`` runs the scenarios and pickles
their results into ``OUTPUT``, by the folder's name.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, split_adapter
from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.model_input import InputKind, InputRows
from mlx_parallm.types.request import KV_CACHE, WEIGHTS, SamplingParams
from mlx_parallm.types.step import (
    PENDING_TOKEN,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
    StepOutput,
)
from mlx_parallm.worker.attention.backend_choice import BackendChoice, choose_backend
from mlx_parallm.worker.device.ranks import Ranks, join_ranks
from mlx_parallm.worker.device.shared_tensors import SharedTensor
from mlx_parallm.worker.generation.load.loading import GenerationLoader
from mlx_parallm.worker.generation.load.plan import GenerationSpec
from mlx_parallm.worker.ops import (
    AddAdapter,
    Allocate,
    Checksums,
    CommitWeights,
    ComputeInputs,
    DropTensors,
    Load,
    Pending,
    PrepareWeights,
    ReadBlocks,
    ReadStates,
    Sleep,
    Step,
    Unload,
    Wake,
    WriteBlocks,
    WriteStates,
    tensor_ops,
)
from mlx_parallm.worker.worker import Worker
from tests.cluster.sharded_models import make_adapter, shapes_of
from tests.compiled_attention import CompiledAttention

#: QUERIES is cut along its outputs, of which each of two ranks has half.
QUERIES = "model.layers.0.self_attn.q_proj.weight"
MODEL, HANDLE = "model", "tensors"
BLOCK_SIZE, NUM_BLOCKS = 8, 40
#: NUM_ROWS of a prompt are embeddings in place of tokens.
NUM_ROWS = 4
NUM_SEQUENCES, PROMPT, DECODE = 9, 11, 2
#: SHARED_BYTES: larger tensors of uploads come to other ranks by sums.
SHARED_BYTES = 1000
GREEDY = SamplingParams(temperature=0.0, logprobs=8)


class Run:
    """A worker with one model, and the results of what it was asked.

    Attributes:
        results: by name.
    """

    def __init__(self, ranks: Ranks | None, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, Any] = {}
        self._ranks = ranks
        self._worker = Worker(ranks=ranks)
        attention = _compiled_attention if "ahead" in folder.name else choose_backend
        self._worker.install(GenerationSpec, GenerationLoader(attention, ranks=ranks))
        self._num_steps = 0
        kv_dtype = "int8" if "int8" in folder.name else None
        spec = GenerationSpec(
            config=ModelConfig(path=str(folder), dtype="auto", kv_cache_dtype=kv_dtype),
            path=folder,
            settings=EngineConfig(
                cache=CacheConfig(block_size=BLOCK_SIZE),
                scheduler=SchedulerConfig(max_num_seqs=NUM_SEQUENCES),
                enable_prompt_embeds="embeds" in folder.name,
            ),
            free_bytes=0 if "packed" in folder.name else None,
        )
        self.plan = self._worker.execute(Load(model=MODEL, spec=spec))
        self.plan = self._worker.execute(Allocate(model=MODEL, num_blocks=NUM_BLOCKS))
        info = self.plan.info
        self.results["path"] = info.path
        self.results["runs ahead"] = info.runs_ahead and info.is_compiled

    def add(self, content: str, adapter: AdapterWeights) -> None:
        """Add an adapter, whose content id is given."""
        layout, tensors = split_adapter(adapter)
        self._put(tensors)
        op = AddAdapter(model=MODEL, content=content, layout=layout, handle=HANDLE)
        try:
            self._worker.execute(op)
        finally:
            self._worker.execute(DropTensors(model=MODEL, handle=HANDLE))

    def decode(
        self, name: str, *adapters: str, replace_first: Callable[[], str] | None = None
    ) -> None:
        """Run prompts and some tokens after them; the first adapters are those of the sequences.

        ``replace_first`` adds an adapter between two tokens, and returns its content: the first
        sequence goes on with it.
        """
        outputs: list[StepOutput] = []
        slots = dict(enumerate(adapters, 1))
        for batch in self._batches(slots):
            outputs.append(self._worker.execute(Step(model=MODEL, batch=batch)))
            if replace_first is not None and batch.sequences[0].start == PROMPT:
                slots[1] = replace_first()
        self.results[name] = outputs

    def decode_rows(self, name: str) -> None:
        """Run prompts of which one has rows in place of some tokens' embeddings."""
        source = np.random.default_rng(5)
        width = shapes_of(self.folder)["model.embed_tokens"][-1]
        rows = HostTensor(source.standard_normal((NUM_ROWS, width)).astype(np.float32))
        self._put({"rows": rows})
        kind = InputKind.PROMPT_EMBEDS
        op = ComputeInputs(model=MODEL, slots=(0,), kind=kind, handles=(HANDLE,))
        self._worker.execute(op)
        outputs: list[StepOutput] = []
        inputs = (InputRows(slot=0, first_row=0, num_rows=NUM_ROWS, offset=1),)
        for batch in self._batches({}):
            first, *others = batch.sequences
            if first.start == 0:
                batch = replace(batch, sequences=(replace(first, inputs=inputs), *others))
            outputs.append(self._worker.execute(Step(model=MODEL, batch=batch)))
        self.results[name] = outputs

    def run_ahead(self, name: str, *adapters: str) -> None:
        """Generate tokens; each step begins before the one before it has ended."""
        slots = dict(enumerate(adapters, 1))
        pending: list[Pending[StepOutput]] = []
        outputs: list[StepOutput] = []
        for batch in self._batches(slots, is_ahead=True):
            pending.append(self._worker.begin(Step(model=MODEL, batch=batch)))
            outputs += [step.wait() for step in pending[:-1]]
            del pending[:-1]
        self.results[name] = [*outputs, pending[0].wait()]

    def move(self, name: str) -> None:
        """Save blocks of a run of ``_batches``, overwrite them, fill them again, and go on.

        Keep what was saved, and two outputs of the last step: of before and of after.
        """
        *_, last = self._batches({})
        before = self._worker.execute(Step(model=MODEL, batch=last))
        blocks = last.sequences[0].block_table + last.sequences[1].block_table
        saved = self._worker.execute(ReadBlocks(model=MODEL, blocks=blocks))
        for data in (saved[1:] + saved[:1], saved):
            self._worker.execute(WriteBlocks(model=MODEL, blocks=blocks, data=data))
            assert self._worker.execute(ReadBlocks(model=MODEL, blocks=blocks)) == data
        after = self._worker.execute(Step(model=MODEL, batch=last))
        self.results[name] = (saved, before, after)

    def move_states(self, name: str) -> None:
        """Save states, exchange them, fill them again, and go on; keep what ``move`` keeps."""
        *_, last = self._batches({})
        slots = tuple(row.slot for row in last.sequences)
        saved = self._worker.execute(ReadStates(model=MODEL, slots=slots))
        before = self._worker.execute(Step(model=MODEL, batch=last))
        for data in (saved[1:] + saved[:1], saved):
            self._worker.execute(WriteStates(model=MODEL, slots=slots, data=data))
            assert self._worker.execute(ReadStates(model=MODEL, slots=slots)) == data
        after = self._worker.execute(Step(model=MODEL, batch=last))
        self.results[name] = (saved, before, after)

    def prepare(
        self, name: str, tensors: dict[str, HostTensor] | None, folder: Path | None = None
    ) -> None:
        """Prepare weights, and commit them if they are not refused."""
        if tensors is not None:
            self._put(tensors)
        handle = None if tensors is None else HANDLE
        refusal = self._worker.execute(PrepareWeights(model=MODEL, folder=folder, handle=handle))
        self._worker.execute(DropTensors(model=MODEL, handle=HANDLE))
        if refusal is None:
            self._worker.execute(CommitWeights(model=MODEL))
        self.results[name] = refusal

    def prepare_other_files(self, name: str) -> None:
        """Prepare a folder of which the last of several ranks has other files on its machine."""
        if self._ranks is not None:
            is_last = self._ranks.rank == self._ranks.size - 1
            other = self.folder.with_name(f"{self.folder.name}-other")
            self.prepare(name, None, self.folder if is_last else other)

    def some_tensors(self, seed: int) -> dict[str, HostTensor]:
        """Return new weights of layers that are cut in either way, and of two that are not."""
        shapes, source = shapes_of(self.folder), np.random.default_rng(seed)
        layer = "model.layers.1"
        names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
        paths = [f"{layer}.{name}" for name in names] + ["model.embed_tokens", "lm_head"]
        if f"{layer}.mlp.switch_mlp.down_proj" in shapes:
            paths[2] = f"{layer}.mlp.switch_mlp.down_proj"
        return {
            f"{path}.weight": HostTensor(
                (0.1 * source.standard_normal(shapes[path])).astype(np.float32)
            )
            for path in paths
        }

    def fail(self, name: str, work: Callable[[], None]) -> None:
        """Keep the error that this raises."""
        try:
            work()
        except ParallmError as error:
            self.results[name] = str(error)

    def sleep(self, level: int) -> None:
        """Free the model's memory, and restore it."""
        self._worker.execute(Sleep(model=MODEL, level=level))
        for tag in (WEIGHTS, KV_CACHE):
            self._worker.execute(Wake(model=MODEL, tag=tag))

    def checksums(self, name: str) -> None:
        """Keep the digests of the weights."""
        self.results[name] = self._worker.execute(Checksums(model=MODEL))

    def close(self) -> None:
        """Free the model."""
        self._worker.execute(Unload(model=MODEL))

    def _put(self, tensors: dict[str, HostTensor]) -> None:
        """Put tensors, of which other ranks than the first have only the small ones."""
        for op in tensor_ops(MODEL, HANDLE, self._as_sent(tensors)):
            self._worker.execute(op)

    def _as_sent(self, tensors: dict[str, HostTensor]) -> dict[str, HostTensor]:
        if self._ranks is None:
            return tensors
        shared: dict[str, HostTensor] = {
            name: SharedTensor(tensor.array) if tensor.nbytes > SHARED_BYTES else tensor
            for name, tensor in tensors.items()
        }
        return shared if self._ranks.rank == 0 else pickle.loads(pickle.dumps(shared))

    def _batches(
        self, slots: dict[int, str], *, is_ahead: bool = False
    ) -> Iterator[ScheduledBatch]:
        """Yield steps of two chunks of prompts, and of one token more each.

        With ``is_ahead`` these are the tokens that the step before chooses, else given ones.
        """
        source = np.random.default_rng(1)
        texts = source.integers(0, 90, (NUM_SEQUENCES, PROMPT + DECODE)).tolist()
        first = 0
        for count in (7, PROMPT - 7, *[1] * DECODE):
            rows = [
                self._row(row, text, first, count, slots if row + 1 in slots else {})
                for row, text in enumerate(texts)
            ]
            if is_ahead and first >= PROMPT:
                rows = [replace(row, token_ids=(PENDING_TOKEN,)) for row in rows]
            self._num_steps += 1
            adapters = dict(slots)
            yield ScheduledBatch(step_id=self._num_steps, sequences=tuple(rows), adapters=adapters)
            first += count

    @staticmethod
    def _row(
        row: int, text: list[int], first: int, count: int, slots: dict[int, str]
    ) -> ScheduledSequence:
        end = first + count
        spec = SampleSpec(params=GREEDY, seed=row, position=end, prompt_ids=(), output_ids=())
        blocks = range(row * 4, row * 4 + -(-end // BLOCK_SIZE))
        return ScheduledSequence(
            seq_id=row,
            slot=row,
            start=first,
            token_ids=tuple(text[first:end]),
            block_table=tuple(blocks),
            adapter_slot=row + 1 if slots else 0,
            sample=spec,
        )


def _compiled_attention(cache: CacheConfig, *_: Any, **__: Any) -> BackendChoice:
    return BackendChoice(CompiledAttention(cache.block_size), 0.0)


def base(run: Run) -> None:
    """Run the model alone."""
    run.decode("base")
    if run.plan.info is not None and run.plan.info.has_state:
        run.move_states("states")
    else:
        run.move("moves")
    run.checksums("digests")


def adapters(run: Run) -> None:
    """Run adapters of all layers beside base rows, replace one, and change weights below them."""
    kinds = [(kind, rank) for kind in ("lora", "dora") for rank in (4, 8, 16, 64)]
    contents = [f"{kind} {rank}" for kind, rank in kinds]
    for seed, (content, (kind, rank)) in enumerate(zip(contents, kinds, strict=True)):
        run.add(content, make_adapter(run.folder, seed, rank, is_dora=kind == "dora"))

    def add_another() -> str:
        run.add("dora 32", make_adapter(run.folder, 9, 32, is_dora=True))
        return "dora 32"

    run.decode("adapters", *contents)
    run.decode("replaced", *contents, replace_first=add_another)
    run.prepare("update", run.some_tensors(seed=5))
    run.decode("beneath", *contents)
    run.sleep(2)
    run.decode("awake", *contents[3:5])
    run.fail("unfit", lambda: run.add("unfit", make_adapter(run.folder, 1, 4, share=2)))


def some(run: Run) -> None:
    """Run a LoRA and a DoRA of all layers beside base rows."""
    run.add("lora 8", make_adapter(run.folder, 1, 8))
    run.add("dora 4", make_adapter(run.folder, 2, 4, is_dora=True))
    run.decode("adapters", "lora 8", "dora 4")
    run.checksums("digests")


def updates(run: Run) -> None:
    """Replace weights by tensors and by a folder, refuse some, sleep and wake."""
    run.checksums("digests before")
    run.prepare("tensors", run.some_tensors(seed=3))
    run.decode("after tensors")
    run.checksums("digests after tensors")
    run.prepare("wrong shape", {QUERIES: HostTensor(np.zeros((32, 64), np.float32))})
    run.prepare("unknown", {"nothing.weight": HostTensor(np.zeros(3, np.float32))})
    broken = np.zeros((64, 64), np.float32)
    broken[-1, -1] = np.nan
    run.prepare("not finite", {QUERIES: HostTensor(broken)})
    for level in (1, 2):
        run.sleep(level)
        run.decode(f"after sleep {level}")
        run.checksums(f"digests after sleep {level}")
    run.prepare("folder", None, run.folder.with_name(f"{run.folder.name}-other"))
    run.decode("after folder")
    run.checksums("digests after folder")
    run.sleep(2)
    run.prepare_other_files("other files")
    run.checksums("digests after all")


def ahead(run: Run) -> None:
    """Let compiled steps run ahead, with and without adapters, one of which is replaced."""
    run.run_ahead("alone")
    run.move("moves")
    run.add("lora 8", make_adapter(run.folder, 1, 8))
    run.add("dora 4", make_adapter(run.folder, 2, 4, is_dora=True))
    run.add("dora 16", make_adapter(run.folder, 3, 16, is_dora=True))
    run.run_ahead("adapters", "lora 8", "dora 4")
    run.run_ahead("replaced", "dora 16", "dora 4", "lora 8")


def embeds(run: Run) -> None:
    """Let a prompt bring rows of embeddings."""
    run.decode("base")
    run.decode_rows("embeds")


def everything(run: Run) -> None:
    """Run all scenarios on one load of the model."""
    base(run)
    adapters(run)
    updates(run)


SCENARIOS: dict[str, Callable[[Run], None]] = {
    scenario.__name__: scenario for scenario in (base, some, ahead, embeds, everything)
}


def run_all(ranks: Ranks | None, scenarios: list[str]) -> dict[str, dict[str, Any]]:
    """Return the results of scenarios, each ``NAME=FOLDER``, by the folder's name."""
    results: dict[str, dict[str, Any]] = {}
    for name, _, folder in (scenario.partition("=") for scenario in scenarios):
        run = Run(ranks, Path(folder))
        SCENARIOS[name](run)
        run.close()
        results[run.folder.name] = run.results
    return results


def main() -> None:
    """Run this rank's part."""
    output, *scenarios = sys.argv[1:]
    ranks = join_ranks("ring") if "MLX_RANK" in os.environ else None
    results = run_all(ranks, scenarios)
    Path(output).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main()
