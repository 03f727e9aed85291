"""States that are saved, overwritten and filled again: the next tokens are equal bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from mlx_parallm.types.errors import StepError
from mlx_parallm.types.step import SampledToken
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.device.faults import LATE
from mlx_parallm.worker.generation.cache_layout import probe_layout, state_form, state_layouts
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.ops import ReadStates, Step, WriteStates
from mlx_parallm.worker.weights.loader import LoadedModel
from tests.builders.architectures.configs import config_of
from tests.builders.architectures.trial import build
from tests.compiled_attention import CompiledAttention
from tests.integration.test_block_moves import BLOCK_SIZE, Device, row, runner_of
from tests.integration.test_parity_generate import loaded_model

#: TABLES: blocks of sequence 0 and of sequence 1, then of what overwrites their states.
TABLES = ((7, 2, 30, 9, 41, 3), (12, 50, 8, 1, 22, 60), (40, 5, 6, 11, 13, 14))
PROMPT_LEN, NEW_TOKENS = 18, 4
slow = pytest.mark.slow
#: Each has another kind of state: gated delta rule, state spaces of two versions, convolutions
#: alone, time mixing, linear attention, a recurrent unit, and the latest tokens, as integers.
FAMILIES = (
    *("qwen3_5", "mamba2", "jamba", "lfm2", "rwkv7", "bailing_moe_linear", "recurrent_gemma"),
    "longcat_flash_ngram",
)
OTHERS = (
    *("baichuan_m1", "bailing_hybrid", "bailing_moe_v3", "falcon_h1", "granitemoehybrid"),
    *("kimi_k3", "kimi_linear", "lfm2_moe", "mamba", "nemotron_h", "plamo2", "qwen3_5_moe"),
    "qwen3_next",
)
#: BFLOAT16: those without experts, which MLX computes in float32 only on a CPU.
BFLOAT16 = ("baichuan_m1", "falcon_h1", "lfm2", "mamba", "mamba2", "nemotron_h", "plamo2")
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


@cache
def prompt_of(seed: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(60) for _ in range(PROMPT_LEN))


def loaded(name: str, dtype: str) -> LoadedModel:
    config = config_of(name)
    model = build(config)
    if dtype != "float32":

        def cast(array: mx.array) -> mx.array:
            is_float = mx.issubdtype(array.dtype, mx.floating)
            return array.astype(DTYPES[dtype]) if is_float else array

        model.update(tree_map(cast, model.parameters()))
    return LoadedModel(model, config | {"torch_dtype": dtype}, Path(name), dtype, 0)


class StateDevice(Device):
    """Sequences in slots, driven by hand."""

    def prefill_slots(self, prompts: Sequence[tuple[int, ...]]) -> list[int]:
        """Run a prompt for each slot, in two chunks; return the tokens that follow them."""
        for first, last in ((0, 11), (11, PROMPT_LEN)):
            rows = [
                row(first, prompt[first:last], TABLES[slot], slot)
                for slot, prompt in enumerate(prompts)
            ]
            output = self.submit(*rows).wait()
        return [token.token_id for token in output.tokens]

    def decode_slots(self, tokens: Sequence[int], **moves: Any) -> list[SampledToken]:
        """Return the next tokens of all slots, the first step with moves."""
        chosen: list[SampledToken] = []
        for start in range(PROMPT_LEN, PROMPT_LEN + NEW_TOKENS):
            rows = [row(start, (token,), TABLES[slot], slot) for slot, token in enumerate(tokens)]
            output = self.submit(*rows, **moves).wait()
            moves = {}
            chosen += output.tokens
            tokens = [token.token_id for token in output.tokens]
        return chosen

    def states(self, *slots: int) -> list[bytes]:
        output = self.submit(saved_states=tuple((slot, b"") for slot in slots)).wait()
        return [bytes(data) for _, data in output.saved]


def assert_states_come_back(device: StateDevice) -> None:
    """Save states and blocks beside the next step, overwrite them, and fill them swapped back."""
    prompts = [prompt_of(0), prompt_of(1)]
    tokens = device.prefill_slots(prompts)
    has_kv = device.worker.runner._blocks.block_bytes > 0
    blocks = tuple(block for table in TABLES[:2] for block in table) if has_kv else ()
    saved_blocks = tuple((block, b"%d" % block) for block in blocks)
    saved = device.submit(saved=saved_blocks, saved_states=((0, b"zero"), (1, b"one"))).wait().saved
    assert [content for content, _ in saved] == [b"%d" % block for block in blocks] + [
        b"zero",
        b"one",
    ]
    data = [bytes(each) for _, each in saved]
    filled = tuple(zip(blocks, data, strict=False))
    first, second = data[-2:]
    assert first != second
    # What the steps write was saved before.
    wanted = device.decode_slots(tokens, saved_states=((0, b"zero"), (1, b"one")))
    device.prefill_slots([prompt_of(2), prompt_of(3)])
    assert all(left not in (first, second) for left in device.states(0, 1))
    assert (
        device.decode_slots(tokens, filled=filled, filled_states=((0, first), (1, second)))
        == wanted
    )
    # A slot may have any state, and others keep theirs.
    device.submit(filled_states=((0, second),)).wait()
    assert device.states(0, 1)[0] == second
    before = device.states(1)
    device.submit(filled_states=((5, first), (0, first))).wait()
    assert device.states(5, 0, 1) == [first, first, *before]


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(each, marks=slow) for each in OTHERS)])
def test_states_of_every_architecture_come_back(name: str) -> None:
    runner = runner_of(loaded(name, "float32"), ReferenceAttention(BLOCK_SIZE))
    assert_states_come_back(StateDevice(runner))


@pytest.mark.parametrize(
    "name", [each if each == "lfm2" else pytest.param(each, marks=slow) for each in BFLOAT16]
)
def test_states_of_16_bits_come_back(name: str) -> None:
    runner = runner_of(loaded(name, "bfloat16"), ReferenceAttention(BLOCK_SIZE))
    assert_states_come_back(StateDevice(runner))


@pytest.mark.parametrize(
    "name", ["qwen3_5", *(pytest.param(n, marks=slow) for n in ("mamba2", "lfm2"))]
)
def test_states_come_back_where_steps_run_ahead(name: str) -> None:
    runner = runner_of(loaded_model(name), CompiledAttention(BLOCK_SIZE))
    assert runner.info.runs_ahead
    assert_states_come_back(StateDevice(runner))


def test_a_form_says_shapes_and_dtypes_in_order() -> None:
    layouts = probe_layout(loaded("mamba2", "bfloat16").model)
    assert state_form(layouts) == " ".join(["bfloat16[3, 160] float32[8, 16, 16]"] * 4)
    assert sum(each.num_bytes for each in state_layouts(layouts)) == 4 * (3 * 160 * 2 + 2048 * 4)
    assert state_form(probe_layout(loaded_model("llama").model)) == ""


def make_device(name: str = "lfm2") -> StateDevice:
    return StateDevice(runner_of(loaded_model(name), ReferenceAttention(BLOCK_SIZE)))


def test_states_are_moved_one_by_one_before_the_step() -> None:
    device = make_device()
    device.prefill_slots([prompt_of(0), prompt_of(1)])
    first, second = device.states(0, 1)
    device.worker.ops.clear()
    output = device.submit(
        row(0, prompt_of(2), TABLES[2], 2),
        saved_states=((0, b"a"), (1, b"b")),
        filled_states=((1, first), (0, second)),
    ).wait()
    assert output.saved == ((b"a", first), (b"b", second))
    kinds = [ReadStates, ReadStates, WriteStates, WriteStates, Step]
    assert [type(op) for op in device.worker.ops] == kinds
    assert device.states(0, 1) == [second, first]


def test_a_state_of_another_size_is_refused_and_changes_nothing() -> None:
    device = make_device()
    device.prefill_slots([prompt_of(0), prompt_of(1)])
    before = device.states(0, 1)
    for wrong in (before[0][:-1], before[0] * 2, b""):
        with pytest.raises(StepError, match="cannot be put into"):
            device.submit(filled_states=((0, wrong),))
        assert device.states(0, 1) == before


def test_a_slot_without_a_state_saves_nothing() -> None:
    device = make_device()
    with pytest.raises(StepError, match="slot 6 has no state"):
        device.states(6)
    plain = StateDevice(runner_of(loaded_model("llama"), ReferenceAttention(BLOCK_SIZE)))
    for moves in ({"saved_states": ((0, b""),)}, {"filled_states": ((0, b""),)}):
        with pytest.raises(StepError, match="no state by slot"):
            plain.submit(**moves)


def test_a_state_of_another_layout_is_not_saved() -> None:
    device = make_device()
    device.prefill_slots([prompt_of(0)])
    states: Any = device.worker.runner._path.states
    state = states.fetch([0])
    states.commit([0], [[array.astype(mx.bfloat16) for array in entries] for entries in state])
    with pytest.raises(StepError, match="another layout"):
        device.states(0)


@pytest.mark.parametrize("is_fill", [False, True])
def test_states_in_flight_are_lost_when_the_device_fails(*, is_fill: bool) -> None:
    runner: ModelRunner = runner_of(loaded_model("lfm2"), CompiledAttention(BLOCK_SIZE))
    StateDevice(runner).prefill_slots([prompt_of(0)])
    before = runner.read_states([0]).wait()
    pending: Any = runner.write_states([0], before) if is_fill else runner.read_states([0])
    runner._faults.note(RuntimeError(f"{LATE}: Insufficient Memory."))
    with pytest.raises(StepError, match="states were moved"):
        pending.wait()
    assert runner.read_states([0]).wait() == before
