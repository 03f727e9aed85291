"""Rows in place of tokens give the tokens that ids give, on every path."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from mlx_parallm.types.model_input import HostArray, InputKind, InputStages, ModelInput, Span
from mlx_parallm.types.request import INPUT_TOKEN, GenerateRequest, SamplingParams
from mlx_parallm.types.step import ScheduledBatch, StepInFlight
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.inputs.runs import InputRun
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.path_choice import ALONE
from mlx_parallm.worker.generation.load.plan import DecoderChoices
from mlx_parallm.worker.generation.load.runner import make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.generation.row_selection import embedding_tables
from mlx_parallm.worker.ops import at_once
from tests.integration.test_parity_generate import (
    BLOCK_SIZE,
    NEW_TOKENS,
    AheadAttention,
    CompiledAttention,
    Session,
    alone,
    assert_same,
    loaded_model,
    random_prompt,
    shared_runner,
)


class InputRunner:
    """Applies a batch's changes of inputs to a runner, as the ops before a step do."""

    def __init__(self, runner: ModelRunner) -> None:
        self.info = runner.info
        self.runner = runner
        #: The inputs of each run.
        self.runs: list[int] = []
        self._open: dict[int, InputRun] = {}

    @property
    def is_empty(self) -> bool:
        """True if no features are kept, and none are being computed."""
        return not self._open and not self.runner.inputs.features

    @property
    def num_computed(self) -> int:
        return sum(self.runs)

    def submit(self, batch: ScheduledBatch) -> StepInFlight:
        self.runner.inputs.features.drop(batch.moves.dropped)
        for number in batch.moves.abandoned:
            del self._open[number]
        for stages in batch.moves.stages:
            if stages.begun:
                self._open[stages.run] = self._begin(stages)
            run = self._open[stages.run]
            for _ in range(stages.num_stages - stages.is_last):
                run.advance()
            assert (run.num_stages == 1) >= stages.is_last
            if stages.is_last:
                self._open.pop(stages.run).wait()
        return self.runner.submit(batch)

    def _begin(self, stages: InputStages) -> InputRun:
        inputs = [
            {
                name: HostTensor(np.frombuffer(each.data, each.dtype).reshape(each.shape))
                for name, each in source.arrays.items()
            }
            for source in stages.begun
        ]
        self.runs.append(len(inputs))
        return self.runner.inputs.begin(stages.slots, stages.begun[0].kind, inputs)


@cache
def runner_of(
    name: str, backend: type[ReferenceAttention] = ReferenceAttention, path: str | None = None
) -> ModelRunner:
    loaded = loaded_model(name)
    layouts = probe_layout(loaded.model)
    attention = backend(BLOCK_SIZE)
    plan = plan_kv(
        layouts,
        loaded.config,
        CacheConfig(block_size=BLOCK_SIZE),
        SchedulerConfig(max_num_seqs=8),
        96,
        attention,
    )
    choices = DecoderChoices(is_cast=False, attention=attention.name, path=path)
    return at_once(make_runner)(
        loaded, layouts, plan, 96, attention, choices=choices, takes_embeds=True
    )[0]


def embedded(name: str, token_ids: tuple[int, ...]) -> np.ndarray:
    """Return the rows of a model's embedding for some tokens, float32 ``[n, width]``."""
    runner = runner_of(name)
    table = embedding_tables(loaded_model(name).model, runner.info.vocab_size)[0]
    return np.array(table(mx.array(token_ids)).astype(mx.float32))


def rows_input(rows: np.ndarray, start: int = 0) -> ModelInput:
    return ModelInput(
        kind=InputKind.PROMPT_EMBEDS,
        content=repr(rows.tobytes()),
        arrays={"rows": HostArray("float32", rows.shape, rows.tobytes())},
        nbytes=rows.nbytes,
        span=Span(start, start + len(rows)),
    )


class EmbedSession(Session):
    """A session whose prompts are rows, or tokens with rows between them."""

    def __init__(
        self,
        name: str,
        backend: type[ReferenceAttention] = ReferenceAttention,
        *,
        num_blocks: int = 96,
        budget: int = 24,
        speculative: SpeculativeConfig | None = None,
        path: str | None = None,
    ) -> None:
        runner = runner_of(name, backend, path)
        super().__init__(runner, num_blocks=num_blocks, budget=budget, speculative=speculative)
        self.inputs = self.runner = InputRunner(runner)
        self.name = name

    def add_rows(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        start: int = 0,
        stop: int | None = None,
        **params: int | float,
    ) -> None:
        """Queue a prompt whose tokens from ``start`` to ``stop`` come as rows."""
        stop = len(prompt) if stop is None else stop
        source = rows_input(embedded(self.name, prompt[start:stop]), start)
        ids = prompt[:start] + (INPUT_TOKEN,) * (stop - start) + prompt[stop:]
        options = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "logprobs": 0, **params}
        request = GenerateRequest(
            request_id=request_id,
            model="m",
            prompt_ids=ids,
            params=SamplingParams(**options),
            inputs=(source,),
        )
        self.scheduler.add(request, seed=0, end_ids=frozenset())


FAMILIES = (
    "llama",
    "llama-4bit",
    "mistral",
    "gemma2",
    "gemma3_text",
    "opt-350m",
    "gpt_oss",
    "lfm2",
    "mamba2",
)


# COMPILED families have a kind of layer each; MLX compiles kernels for all others too.
COMPILED = ("llama", "gemma3_text", "lfm2")


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *((ReferenceAttention, name) for name in FAMILIES),
        *((CompiledAttention, name) for name in COMPILED),
        *(
            pytest.param(CompiledAttention, name, marks=pytest.mark.slow)
            for name in FAMILIES
            if name not in COMPILED
        ),
    ],
)
def test_rows_give_the_tokens_of_ids(name: str, backend: type[ReferenceAttention]) -> None:
    """Ragged prompts in chunks, beside prompts of ids and with ids around the rows."""
    session = EmbedSession(name, backend, budget=12)
    assert session.inputs.info.input_width > 0
    prompts = {f"r{length}": random_prompt(length) for length in (1, 5, 13, 35)}
    for request_id, prompt in prompts.items():
        session.add_rows(request_id, prompt)
        session.step()
    session.add("ids", random_prompt(13))
    session.add_rows("mixed", random_prompt(13), 4, 9)
    session.finish()
    for request_id, prompt in prompts.items():
        assert_same(session.result(request_id), alone(name, prompt))
    for request_id in ("ids", "mixed"):
        assert_same(session.result(request_id), alone(name, random_prompt(13)))


def test_a_model_run_alone_takes_rows() -> None:
    session = EmbedSession("llama", path=ALONE)
    assert session.inputs.info.path == ALONE
    session.add_rows("a", random_prompt(13))
    session.add_rows("b", random_prompt(5), 2, 4)
    session.finish()
    assert_same(session.result("a"), alone("llama", random_prompt(13)))
    assert_same(session.result("b"), alone("llama", random_prompt(5)))


def test_prefixes_of_rows_are_reused_and_others_are_not() -> None:
    session = EmbedSession("llama")
    for request_id, prompt in (("a", 0), ("b", 0), ("c", 1)):
        session.add_rows(request_id, random_prompt(29, seed=prompt))
        session.finish()
    assert [session.cached[request_id] for request_id in "abc"] == [0, 28 - 28 % BLOCK_SIZE, 0]
    for request_id, prompt in (("a", 0), ("b", 0), ("c", 1)):
        assert_same(session.result(request_id), alone("llama", random_prompt(29, seed=prompt)))


def test_rows_are_not_taken_for_the_tokens_that_stand_in_their_places() -> None:
    session = EmbedSession("llama")
    zeros = (INPUT_TOKEN,) * 29
    session.add("ids", zeros)
    session.finish()
    session.add_rows("rows", random_prompt(29))
    session.finish()
    assert session.cached["rows"] == 0
    assert_same(session.result("rows"), alone("llama", random_prompt(29)))
    assert_same(session.result("ids"), alone("llama", zeros))


@pytest.mark.parametrize("backend", [ReferenceAttention, AheadAttention, CompiledAttention])
def test_preempted_rows_are_computed_again(backend: type[ReferenceAttention]) -> None:
    session = EmbedSession("llama", backend, num_blocks=16, budget=64)
    prompts = {f"r{index}": random_prompt(14, seed=index) for index in range(4)}
    for request_id, prompt in prompts.items():
        session.add_rows(request_id, prompt)
    session.finish()
    assert session.scheduler.stats().num_preemptions > 0
    for request_id, prompt in prompts.items():
        assert_same(session.result(request_id), alone("llama", prompt))


def test_samples_share_one_prefill_of_rows() -> None:
    session = EmbedSession("llama")
    session.add_rows("a", random_prompt(13), n=3)
    session.finish()
    assert session.inputs.num_computed == 1
    for index in range(3):
        assert session.result("a", index).tokens == alone("llama", random_prompt(13)).tokens


def test_proposals_after_rows_change_no_token() -> None:
    speculative = SpeculativeConfig(prompt_lookup_min=1, disable_by_batch_size=8)
    for backend in (ReferenceAttention, CompiledAttention):
        session = EmbedSession("llama", backend, speculative=speculative)
        prompts = {f"r{size}": random_prompt(size) * 3 for size in (1, 4, 9)}
        for request_id, prompt in prompts.items():
            session.add_rows(request_id, prompt, 1)
        session.finish()
        for request_id, prompt in prompts.items():
            assert session.result(request_id).tokens == alone("llama", prompt).tokens


def test_a_model_that_looks_ids_up_in_every_layer_takes_no_rows() -> None:
    assert runner_of("gemma3n").info.input_width == 0


def test_rows_are_not_taken_unless_asked_for() -> None:
    assert shared_runner("llama").info.input_width == 0
