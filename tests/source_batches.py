"""Requests to encoder-decoders, batched over a runner as a scheduler would, and alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.config import CacheConfig, SchedulerConfig
from mlx_parallm.generation.device_runner import DeviceRunner
from mlx_parallm.models.checkpoints.decoder_sizes import context_length
from mlx_parallm.models.seq2seq import t5
from mlx_parallm.models.seq2seq.dense_cache import set_source
from mlx_parallm.types.model_input import (
    HostArray,
    InputKind,
    InputStages,
    ModelInput,
    SourcePlace,
)
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import (
    PENDING_TOKEN,
    Moves,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
    SourceTable,
    StepInFlight,
    StepOutput,
)
from mlx_parallm.worker.attention.base import AttentionBackend
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.runner import make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.ops import (
    ComputeInputs,
    Done,
    DropInputs,
    DropTensors,
    Op,
    Pending,
    PutTensors,
    ReadBlocks,
    Step,
    WriteBlocks,
    at_once,
)
from mlx_parallm.worker.weights.loader import LoadedModel

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, MAX_SOURCE_LEN = 4, 1024, 128, 1000
GREEDY = SamplingParams(temperature=0.0, logprobs=0)
T5_VOCAB = 97
T5_FIELDS: dict[str, Any] = {
    "vocab_size": T5_VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "tie_word_embeddings": False,
}


def tiny_t5(seed: int = 0, **fields: Any) -> LoadedModel:
    """Return a random T5 whose answers depend on the source, the prompt and the bias."""
    args = t5.ModelArgs(**T5_FIELDS | fields)
    mx.random.seed(seed)
    model = t5.Model(args)
    model.update(tree_map(lambda array: mx.random.normal(array.shape) * 0.4, model.parameters()))
    mx.eval(model.parameters())
    config = {"model_type": "t5"} | T5_FIELDS | fields
    return LoadedModel(model, config, Path("t5"), "float32", 0)


def new_runner(
    loaded: LoadedModel, attention: AttentionBackend, num_blocks: int = NUM_BLOCKS
) -> ModelRunner:
    layouts = probe_layout(loaded.model)
    cache, scheduler = CacheConfig(block_size=BLOCK_SIZE), SchedulerConfig(max_num_seqs=8)
    longest = min(MAX_LEN, context_length(loaded.config) or MAX_LEN)
    plan = plan_kv(layouts, loaded.config, cache, scheduler, longest, attention)
    return at_once(make_runner)(
        loaded, layouts, plan, num_blocks, attention, max_source_len=MAX_SOURCE_LEN
    )[0]


def frames_source(arrays: Mapping[str, mx.array], *, shape_key: str | None = None) -> ModelInput:
    """Return a source of frames, two of which are a position."""
    (name, array), length = next(iter(arrays.items())), next(iter(arrays.values())).shape[0] // 2
    data = np.array(array)
    return ModelInput(
        kind=InputKind.SOURCE,
        content=str(hash(data.tobytes())),
        arrays={name: HostArray(str(data.dtype), data.shape, data.tobytes())},
        nbytes=0,
        cost=length,
        shape_key=shape_key,
        num_kv_tokens=length,
    )


@dataclass(eq=False)
class Request:
    """A source, a decoder prompt, and how many tokens are wanted."""

    source: ModelInput
    prompt: tuple[int, ...]
    num_tokens: int = 6
    adapter_slot: int = 0
    adapter: str | None = None

    @property
    def place(self) -> SourcePlace:
        return SourcePlace(block_table=(), adapter_slot=self.adapter_slot, adapter=self.adapter)


def random_text(rng: random.Random, length: int, vocab_size: int = T5_VOCAB) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(length))


#: ``Answer``: the tokens of a request, each with its log-probability.
Answer = list[tuple[int, float]]


def alone(loaded: LoadedModel, request: Request) -> Answer:
    """Return what the model writes by its own caches."""
    model = loaded.model
    caches = make_prompt_cache(model)
    set_source(model, caches, arrays_of(request.source))
    answer: Answer = []
    inputs = list(request.prompt)
    for _ in range(request.num_tokens):
        logits = model(mx.array([inputs]), cache=caches)[0, -1].astype(mx.float32)
        logprobs = np.array(logits - mx.logsumexp(logits))
        inputs = [int(logprobs.argmax())]
        answer.append((inputs[0], float(logprobs[inputs[0]])))
    return answer


def same(answer: Answer, other: Answer, atol: float = 1e-3) -> bool:
    """True if two answers have the same tokens, and log-probabilities but for rounding."""
    if [token for token, _ in answer] != [token for token, _ in other]:
        return False
    return np.allclose([each for _, each in answer], [each for _, each in other], atol=atol)


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer], atol: float = 1e-3) -> None:
    for answer, own in zip(answers, expected, strict=True):
        assert same(answer, own, atol), (answer, own)


def arrays_of(source: ModelInput) -> dict[str, mx.array]:
    return {
        name: mx.array(np.frombuffer(array.data, array.dtype).reshape(array.shape))
        for name, array in source.arrays.items()
    }


class OneModel:
    """The part of a worker that a DeviceRunner uses."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._tensors: dict[str, dict[str, HostTensor]] = {}

    def execute(self, op: Op[Any]) -> Any:
        return self.begin(op).wait()

    def begin(self, op: Op[Any]) -> Pending[Any]:
        match op:
            case Step():
                return self.runner.submit(op.batch)
            case PutTensors():
                self._tensors.setdefault(op.handle, {}).update(op.tensors)
            case DropTensors():
                self._tensors.pop(op.handle, None)
            case ComputeInputs():
                return self.runner.begin_inputs(op, [self._tensors[each] for each in op.handles])
            case DropInputs():
                self.runner.drop_inputs(op.slots)
            case ReadBlocks():
                return self.runner.read_blocks(op.blocks)
            case WriteBlocks():
                return self.runner.write_blocks(op.blocks, op.data)
            case _:
                raise AssertionError(op)
        return Done(None)


@dataclass(eq=False)
class Running:
    """A request whose source has blocks."""

    request: Request
    seq_id: int
    source_blocks: tuple[int, ...]
    blocks: tuple[int, ...]
    num_computed: int = 0
    num_sampled: int = 0
    answer: Answer = field(default_factory=list)

    @property
    def source(self) -> SourceTable:
        return SourceTable(
            block_table=self.source_blocks, num_tokens=self.request.source.num_kv_tokens
        )

    @property
    def num_left(self) -> int:
        """Tokens that steps still have to choose."""
        return self.request.num_tokens - self.num_sampled


class Batch:
    """Runs requests in one batch: they join one by one, and their blocks go to later ones.

    Blocks are handed out in random order, and given back as soon as the last step of a sequence
    was submitted.
    """

    def __init__(self, runner: ModelRunner, *, seed: int = 0, num_blocks: int = NUM_BLOCKS) -> None:
        self.rng = random.Random(seed)
        self.worker = OneModel(runner)
        plan: Any = SimpleNamespace(info=runner.info, prepares_shapes=False)
        worker: Any = self.worker
        self.device = DeviceRunner(worker, "m", plan)
        self.runner = runner
        self.free = list(range(num_blocks))
        self._steps = count()
        self._runs = count()
        self._ids = count()

    def take(self, num_tokens: int) -> tuple[int, ...]:
        """Return free blocks for so many tokens, in random order."""
        self.rng.shuffle(self.free)
        blocks = [self.free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]
        return tuple(blocks)

    def start(self, request: Request) -> Running:
        """Give a request its blocks."""
        length = len(request.prompt) + request.num_tokens
        source = self.take(request.source.num_kv_tokens)
        return Running(request, next(self._ids), source, self.take(length))

    def end(self, running: Running) -> None:
        """Take the blocks of a request back."""
        self.free += running.source_blocks + running.blocks

    def stages(self, started: Sequence[Running], num_stages: int | None = None) -> InputStages:
        """Return the first stages of a run of sources; None: all of them."""
        total = self.runner.info.num_tower_stages
        return InputStages(
            run=next(self._runs),
            slots=tuple(each.seq_id for each in started),
            begun=tuple(each.request.source for each in started),
            places=tuple(
                replace(each.request.place, block_table=each.source_blocks) for each in started
            ),
            num_stages=total if num_stages is None else num_stages,
            is_last=num_stages in {None, total},
            tokens=0,
        )

    def submit(self, rows: Sequence[ScheduledSequence], **moves: Any) -> StepInFlight:
        adapters: dict[int, str] = moves.pop("adapters", {})
        batch = ScheduledBatch(
            step_id=next(self._steps),
            sequences=tuple(rows),
            moves=Moves(**moves),
            adapters=adapters,
        )
        return self.device.submit(batch)

    def row(self, running: Running, num_tokens: int | None = None) -> ScheduledSequence:
        """Return the next row of a request, and note that it runs.

        ``num_tokens`` is that of a chunk of the prompt; None: all that is left.
        """
        request, start = running.request, running.num_computed
        prompt = request.prompt[start:][:num_tokens]
        if not prompt:
            known = running.answer[running.num_sampled - 1 : running.num_sampled]
            prompt = (known[0][0] if known else PENDING_TOKEN,)
        end = start + len(prompt)
        running.num_computed = end
        samples = end >= len(request.prompt)
        running.num_sampled += samples
        spec = SampleSpec(params=GREEDY, seed=0, position=end, prompt_ids=(), output_ids=())
        return ScheduledSequence(
            seq_id=running.seq_id,
            slot=0,
            start=start,
            token_ids=prompt,
            block_table=running.blocks[: -(-end // BLOCK_SIZE)],
            adapter_slot=request.adapter_slot,
            sample=spec if samples else None,
            source=running.source,
        )

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """Return the answers to all requests, batched."""
        started = [self.start(request) for request in requests]
        waiting, runs = list(started), list[tuple[InputStages, list[Running]]]()
        active: list[Running] = []
        in_flight: list[tuple[StepInFlight, list[Running]]] = []
        by_id = {each.seq_id: each for each in started}
        while waiting or runs or active:
            stages = self._advance(runs, waiting, active)
            self.rng.shuffle(active)
            rows = [self.row(each, self.rng.randint(1, 17)) for each in active]
            adapters = {
                each.request.adapter_slot: each.request.adapter
                for each in active
                if each.request.adapter
            }
            if rows or stages:
                step = self.submit(rows, stages=tuple(stages), adapters=adapters)
                in_flight.append((step, list(active)))
            for each in [each for each in active if not each.num_left]:
                active.remove(each)
                self.end(each)
            while len(in_flight) > self.runner.info.runs_ahead:
                note(in_flight.pop(0)[0].wait(), by_id)
        for step, _ in in_flight:
            note(step.wait(), by_id)
        return [each.answer for each in started]

    def _advance(
        self,
        runs: list[tuple[InputStages, list[Running]]],
        waiting: list[Running],
        active: list[Running],
    ) -> list[InputStages]:
        """Begin runs or continue them; requests whose source is written are active then."""
        total, planned = self.runner.info.num_tower_stages, []
        for run in list(runs):
            stages, members = run
            number = self.rng.randint(1, total - stages.num_stages)
            done = stages.num_stages + number
            planned.append(
                replace(stages, begun=(), places=(), num_stages=number, is_last=done == total)
            )
            runs.remove(run)
            if done == total:
                active += members
            else:
                runs.append((replace(stages, num_stages=done), members))
        if waiting and self.rng.random() < 0.6:
            members = [waiting.pop(0)]
            while waiting and _can_join(members[0], waiting[0]) and self.rng.random() < 0.5:
                members.append(waiting.pop(0))
            stages = self.stages(members, self.rng.randint(1, total))
            planned.append(stages)
            if stages.is_last:
                active += members
            else:
                runs.append((stages, members))
        return planned


def _can_join(first: Running, other: Running) -> bool:
    key = first.request.source.shape_key
    return key is not None and key == other.request.source.shape_key


def note(output: StepOutput, by_id: Mapping[int, Running]) -> None:
    assert not output.failed
    for token in output.tokens:
        assert token.logprob is not None
        by_id[token.seq_id].answer.append((token.token_id, token.logprob.logprob))


def adapter_of(paths: Mapping[str, tuple[int, int]], seed: int) -> AdapterWeights:
    """Return a LoRA of linear layers, by path with the widths of their outputs and inputs."""
    random = np.random.default_rng(seed)

    def tensor(*shape: int) -> HostTensor:
        return HostTensor(random.normal(0, 0.4, shape).astype(np.float32))

    return AdapterWeights(
        {
            path: LowRank(kind="linear", a=tensor(4, inner), b=tensor(out, 4), scale=1.0)
            for path, (out, inner) in paths.items()
        }
    )


def merged(loaded: LoadedModel, adapter: AdapterWeights) -> None:
    """Add an adapter to the weights of a model."""
    modules = dict(loaded.model.named_modules())
    for path, change in adapter.modules.items():
        weight = modules[path].weight
        modules[path].weight = weight + change.scale * (to_mlx(change.b) @ to_mlx(change.a))
    mx.eval(loaded.model.parameters())
