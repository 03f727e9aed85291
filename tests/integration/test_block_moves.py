"""Blocks that are saved, overwritten and filled again: the next tokens are equal bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from mlx_parallm.config import CacheConfig, SchedulerConfig
from mlx_parallm.generation.device_runner import DeviceRunner
from mlx_parallm.types.errors import StepError
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import (
    PENDING_TOKEN,
    PIECE_BLOCKS,
    Moves,
    SampledToken,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
    StepInFlight,
)
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from mlx_parallm.worker.attention.quantised_reference import QuantisedReferenceAttention
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.device.faults import LATE
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.runner import make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.ops import (
    Op,
    Pending,
    ReadBlocks,
    ReadStates,
    Step,
    WriteBlocks,
    WriteStates,
    at_once,
)
from mlx_parallm.worker.weights.loader import LoadedModel
from tests.compiled_attention import AheadAttention, CompiledAttention
from tests.integration.test_parity_generate import build_model, loaded_model, random_prompt
from tests.integration.test_speculation import with_draft
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import CudaShim, MetalShim

BLOCK_SIZE, NUM_BLOCKS = 4, 64
PROMPT, NEW_TOKENS = random_prompt(18), 5
#: ``TABLE`` has the prompt and the new tokens, ``OTHER`` is where they come back.
TABLE, OTHER = (7, 2, 30, 9, 41, 3), (12, 50, 8, 1, 22, 60)
#: Full attention, windows, windows with sinks, latent attention, and an index without values.
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "deepseek_v32")
slow = pytest.mark.slow
GREEDY = SamplingParams(temperature=0.0, logprobs=4)


class OneModel:
    """The part of a worker that a DeviceRunner uses, which notes its ops."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.ops: list[Op[Any]] = []

    def begin(self, op: Op[Any]) -> Pending[Any]:
        self.ops.append(op)
        match op:
            case Step():
                return self.runner.submit(op.batch)
            case ReadBlocks():
                return self.runner.read_blocks(op.blocks)
            case WriteBlocks():
                return self.runner.write_blocks(op.blocks, op.data)
            case ReadStates():
                return self.runner.read_states(op.slots)
            case WriteStates():
                return self.runner.write_states(op.slots, op.data)
            case _:
                raise AssertionError(op)


class Device:
    """A DeviceRunner, driven by hand."""

    def __init__(self, runner: ModelRunner) -> None:
        self.worker = OneModel(runner)
        plan: Any = SimpleNamespace(info=runner.info, prepares_shapes=False)
        worker: Any = self.worker
        self._runner = DeviceRunner(worker, "m", plan)
        self._steps = itertools.count()

    def submit(self, *rows: ScheduledSequence, **moves: Any) -> StepInFlight:
        batch = ScheduledBatch(step_id=next(self._steps), sequences=rows, moves=Moves(**moves))
        return self._runner.submit(batch)

    def prefill(self, prompt: Sequence[int], table: tuple[int, ...]) -> int:
        """Run a prompt; return the token that follows it."""
        output = self.submit(row(0, tuple(prompt), table)).wait()
        return output.tokens[0].token_id

    def decode(self, token: int, table: tuple[int, ...], **moves: Any) -> list[SampledToken]:
        """Return the tokens after the prompt and its first token, the first step with moves."""
        tokens: list[SampledToken] = []
        for start in range(len(PROMPT), len(PROMPT) + NEW_TOKENS):
            output = self.submit(row(start, (token,), table), **moves).wait()
            moves = {}
            tokens += output.tokens
            token = output.tokens[-1].token_id
        return tokens

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        output = self.submit(saved=tuple((block, b"") for block in blocks)).wait()
        return [bytes(data) for _, data in output.saved]


def row(
    start: int, token_ids: tuple[int, ...], table: tuple[int, ...], seq_id: int = 0
) -> ScheduledSequence:
    end = start + len(token_ids)
    return ScheduledSequence(
        seq_id=seq_id,
        slot=seq_id,
        start=start,
        token_ids=token_ids,
        block_table=table[: -(-end // BLOCK_SIZE)],
        sample=SampleSpec(params=GREEDY, seed=0, position=end, prompt_ids=(), output_ids=()),
    )


def runner_of(loaded: LoadedModel, attention: Any, num_blocks: int = NUM_BLOCKS) -> ModelRunner:
    layouts = probe_layout(loaded.model)
    cache_config, scheduler = CacheConfig(block_size=BLOCK_SIZE), SchedulerConfig(max_num_seqs=8)
    plan = plan_kv(layouts, loaded.config, cache_config, scheduler, NUM_BLOCKS, attention)
    return at_once(make_runner)(loaded, layouts, plan, num_blocks, attention)[0]


@cache
def bfloat16_model(name: str) -> LoadedModel:
    model, config = build_model(name)
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    return LoadedModel(
        model, config | {"torch_dtype": "bfloat16"}, loaded_model(name).path, "bfloat16", 0
    )


def quantised(bits: int) -> QuantisedReferenceAttention:
    return QuantisedReferenceAttention(BLOCK_SIZE, KVQuantisation(bits=bits, group_size=32))


def assert_blocks_come_back(device: Device) -> None:
    """Save the blocks of a prompt beside its next step, overwrite them, and fill them twice."""
    token = device.prefill(PROMPT, TABLE)
    contents = [b"content %d" % block for block in TABLE]
    saved = device.submit(saved=tuple(zip(TABLE, contents, strict=True))).wait().saved
    assert [content for content, _ in saved] == contents
    # The step writes the last block after it was saved.
    wanted = device.decode(token, TABLE, saved=tuple(zip(TABLE, contents, strict=True)))
    assert len({bytes(data) for _, data in saved}) == len(TABLE)
    device.prefill(random_prompt(24, seed=3), TABLE)
    before = device.read(TABLE)
    assert all(data != old for data, (_, old) in zip(before, saved, strict=True))
    data = [old for _, old in saved]
    assert device.decode(token, OTHER, filled=tuple(zip(OTHER, data, strict=True))) == wanted
    assert device.read(TABLE) == before, "blocks were changed that nothing was put into"
    assert device.decode(token, TABLE, filled=tuple(zip(TABLE, data, strict=True))) == wanted
    assert all(each.logprob is not None and len(each.logprob.top) == 4 for each in wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_of_every_family_come_back(name: str) -> None:
    assert_blocks_come_back(Device(runner_of(loaded_model(name), ReferenceAttention(BLOCK_SIZE))))


@pytest.mark.parametrize(
    "name", [each if each == "llama" else pytest.param(each, marks=slow) for each in FAMILIES]
)
@pytest.mark.parametrize("attention", [AheadAttention, CompiledAttention])
def test_blocks_come_back_where_steps_run_ahead(name: str, attention: Any) -> None:
    assert_blocks_come_back(Device(runner_of(loaded_model(name), attention(BLOCK_SIZE))))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("llama", 8),
        ("deepseek_v32", 4),
        *(pytest.param(*each, marks=slow) for each in itertools.product(FAMILIES, (8, 4))),
    ],
)
def test_quantised_blocks_come_back_with_their_scales(name: str, bits: int) -> None:
    assert_blocks_come_back(Device(runner_of(loaded_model(name), quantised(bits))))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_blocks_of_16_bits_come_back(name: str, bits: int | None) -> None:
    attention = ReferenceAttention(BLOCK_SIZE) if bits is None else quantised(bits)
    assert_blocks_come_back(Device(runner_of(bfloat16_model(name), attention)))


@pytest.mark.parametrize(
    ("shim", "bits", "make"),
    [
        (MetalShim, 8, bfloat16_model),
        *(
            pytest.param(*each, marks=slow)
            for each in itertools.product(
                (CudaShim, MetalShim), (None, 8, 4), (loaded_model, bfloat16_model)
            )
        ),
    ],
)
def test_blocks_of_kernels_come_back(
    shim: Any, bits: int | None, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_compiler()
    # The shim runs a kernel at once, which a function that MLX traces may not.
    monkeypatch.setattr(mx, "compile", lambda function, **_: function)
    scheme = None if bits is None else KVQuantisation(bits=bits, group_size=32)
    runner = runner_of(make("llama"), KernelAttention(BLOCK_SIZE, shim(), quantisation=scheme))
    assert runner.info.runs_ahead
    assert_blocks_come_back(Device(runner))


@pytest.mark.parametrize("attention", [ReferenceAttention, AheadAttention, CompiledAttention])
def test_a_block_has_the_kv_of_a_draft_model_too(attention: Any) -> None:
    runner = with_draft(
        "llama", attention, noise=0.01, vocab=loaded_model("llama").config["vocab_size"]
    )
    device = Device(runner)
    plain = Device(runner_of(loaded_model("llama"), attention(BLOCK_SIZE)))
    token = device.prefill(PROMPT, TABLE)
    assert token == plain.prefill(PROMPT, TABLE)
    (both,), (own,) = device.read([7]), plain.read([7])
    assert len(both) == 2 * len(own)
    assert both.startswith(own)
    # A draft model that is another one has another KV; here it has computed nothing yet.
    data = [bytes(own) + bytes(range(256)) * (len(own) // 256)]
    device.submit(filled=((12, data[0]),)).wait()
    assert device.read([12, 7]) == [data[0], both]


def test_nothing_is_waited_for_until_results_are_needed() -> None:
    """Save and fill while the prompt, and what overwrites it, are in flight."""
    device = Device(runner_of(loaded_model("llama"), CompiledAttention(BLOCK_SIZE)))
    token = device.prefill(PROMPT, TABLE)
    data = device.read(TABLE)
    wanted = device.decode(token, TABLE)
    device.prefill(random_prompt(24, seed=5), TABLE)
    steps = [
        device.submit(row(0, PROMPT, TABLE)),
        device.submit(
            row(len(PROMPT), (PENDING_TOKEN,), TABLE), saved=tuple((b, b"") for b in TABLE[:4])
        ),
        device.submit(row(0, random_prompt(24, seed=6), TABLE)),
        # The step before may still read what is filled now.
        device.submit(
            row(len(PROMPT), (token,), TABLE), filled=tuple(zip(TABLE, data, strict=True))
        ),
    ]
    outputs = [step.wait() for step in steps]
    assert [each for _, each in outputs[1].saved] == data[:4]
    assert outputs[1].tokens[0] == outputs[3].tokens[0] == wanted[0]


@pytest.mark.parametrize("attention", [ReferenceAttention, CompiledAttention])
def test_what_is_saved_is_what_was_there_before_it_is_filled(attention: Any) -> None:
    device = Device(runner_of(loaded_model("llama"), attention(BLOCK_SIZE)))
    device.prefill(PROMPT, TABLE)
    first, second = device.read([7, 2])
    pairs = ((7, second), (2, first))
    output = device.submit(saved=((7, b"a"), (2, b"b")), filled=pairs).wait()
    assert output.saved == ((b"a", first), (b"b", second))
    assert output.tokens == ()
    assert device.read([7, 2]) == [second, first]


def test_moves_come_before_the_step_in_pieces() -> None:
    backend = ReferenceAttention(BLOCK_SIZE)
    device = Device(runner_of(loaded_model("llama"), backend, 3 * PIECE_BLOCKS))
    device.prefill(PROMPT, TABLE)
    (data,) = device.read([7])
    device.worker.ops.clear()
    blocks = range(20, 20 + 2 * PIECE_BLOCKS + 1)
    filled = tuple((block, data) for block in blocks)
    saved = tuple((block, b"%d" % block) for block in blocks)
    output = device.submit(row(0, PROMPT, tuple(range(5))), saved=saved, filled=filled).wait()
    assert [content for content, _ in output.saved] == [content for _, content in saved]
    kinds = [type(op) for op in device.worker.ops]
    assert kinds == [ReadBlocks] * 3 + [WriteBlocks] * 3 + [Step]
    sizes = [len(op.blocks) for op in device.worker.ops if isinstance(op, ReadBlocks | WriteBlocks)]
    assert sizes == [PIECE_BLOCKS, PIECE_BLOCKS, 1] * 2
    assert device.read(blocks) == [data] * len(blocks)
    # Nothing moves: not one op more.
    device.worker.ops.clear()
    device.prefill(PROMPT, TABLE)
    assert [type(op) for op in device.worker.ops] == [Step]


@pytest.mark.parametrize("attention", [ReferenceAttention, CompiledAttention])
def test_a_row_of_another_size_is_refused_and_changes_nothing(attention: Any) -> None:
    device = Device(runner_of(loaded_model("llama"), attention(BLOCK_SIZE)))
    device.prefill(PROMPT, TABLE)
    before = device.read(TABLE)
    for wrong in (before[0][:-1], before[0] * 2, b""):
        with pytest.raises(StepError, match="bytes"):
            device.submit(filled=((7, before[1]), (2, wrong)))
        assert device.read(TABLE) == before
    assert device.prefill(PROMPT, OTHER) == device.prefill(PROMPT, TABLE)


def test_a_model_without_kv_by_block_saves_nothing() -> None:
    device = Device(runner_of(loaded_model("mamba2"), ReferenceAttention(BLOCK_SIZE)))
    with pytest.raises(StepError, match="no KV by block"):
        device.read([1])


@pytest.mark.parametrize("is_fill", [False, True])
def test_moves_in_flight_are_lost_when_the_device_fails(*, is_fill: bool) -> None:
    runner = runner_of(loaded_model("llama"), CompiledAttention(BLOCK_SIZE))
    before = runner.read_blocks([7]).wait()
    pending: Any = runner.write_blocks([7], before) if is_fill else runner.read_blocks([7])
    runner._faults.note(RuntimeError(f"{LATE}: Insufficient Memory."))
    with pytest.raises(StepError, match="states were moved"):
        pending.wait()
    assert runner.read_blocks([7]).wait() == before
