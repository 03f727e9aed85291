"""``LLM(data_parallel_size=2)`` gives what one engine gives, and leaves no process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.config import CacheConfig
from mlx_parallm.grammar.spec import GrammarKind, GrammarSpec
from mlx_parallm.peers.child_process import ChildProcess
from mlx_parallm.types.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
)
from tests.adapter_files import save
from tests.processes import are_gone, engines_of
from tests.server_process import ROOT, user_environment

pytestmark = pytest.mark.engines

CACHE = CacheConfig(kv_cache_bytes=1 << 27)
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
CHATS = [[{"role": "user", "content": f"What is {number} + 25?"}] for number in range(8)]
TEXTS = ["Susan works as a baker in Rome.", "Who has a job in Rome?", "I love the sea."]


@pytest.fixture(scope="module")
def single() -> LLM:
    return LLM(cache=CACHE)


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM(cache=CACHE, data_parallel_size=2) as llm:
        yield llm


def own_engines() -> set[int]:
    return set(engines_of(os.getpid()))


def said(llm: LLM, params: SamplingParams = GREEDY, **options: Any) -> list[list[str]]:
    outputs = llm.chat(CHATS, params, **options)
    return [[sample.text for sample in output.outputs] for output in outputs]


def test_two_engines_answer_in_order_what_one_answers(single: LLM, two: LLM) -> None:
    assert len(own_engines()) == 2
    assert said(two) == said(single)
    prompts = [two.tokenizer.encode(text) for text in TEXTS]
    outputs = two.generate(prompts, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [tuple(ids) for ids in prompts]
    assert [each.outputs for each in outputs] == [
        each.outputs for each in single.generate(TEXTS, GREEDY)
    ]


def test_samples_depend_on_the_seed_only(single: LLM, two: LLM) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=7, n=4)
    assert said(two, params) == said(single, params)


def test_a_grammar_holds(two: LLM) -> None:
    grammar = two.grammar(GrammarSpec(GrammarKind.REGEX, "[0-9]{3}"))
    params = SamplingParams(max_tokens=8, temperature=1.0, grammar=grammar)
    for output in two.generate(TEXTS, params):
        assert len(output.outputs[0].text) == 3
        assert output.outputs[0].text.isdecimal()


def test_the_callers_thread_hears_of_each_end(two: LLM) -> None:
    ended: list[tuple[str, int]] = []
    outputs = two.generate(
        TEXTS, GREEDY, on_finish=lambda each: ended.append((each.request_id, threading.get_ident()))
    )
    assert sorted(ended) == sorted((each.request_id, threading.get_ident()) for each in outputs)


def scored(llm: LLM, adapter: Any = None) -> np.ndarray:
    """Return the log-probabilities of the tokens of ``TEXTS``."""
    outputs = llm.generate(TEXTS, SCORED, adapter=adapter)
    entries = [entry for output in outputs for entry in output.prompt_logprobs or ()]
    return np.array([entry.logprob for entry in entries if entry is not None])


def test_both_engines_have_an_adapter(single: LLM, two: LLM, tmp_path: Path) -> None:
    base = scored(two)
    for llm in (single, two):
        info = llm.load_adapter("mine", save(tmp_path, 1))
        assert (info.name, info.version) == ("mine", "1")
    adapted = scored(two, "mine")
    np.testing.assert_allclose(adapted, scored(single, "mine"), atol=1e-4)
    assert np.abs(adapted - base).max() > 0.1
    adapters = ["mine", None, "mine"]
    np.testing.assert_allclose(scored(two, adapters), scored(single, adapters), atol=1e-4)
    assert two.load_adapter("mine", save(tmp_path, 2), version="new").version == "new"
    two.unload_adapter("mine")
    with pytest.raises(ModelNotFoundError):
        scored(two, "mine")
    np.testing.assert_allclose(scored(two), base, atol=1e-4)


def test_what_is_wrong_is_refused_and_the_rest_goes_on(single: LLM, two: LLM) -> None:
    ended: list[Any] = []
    with pytest.raises(ContextLengthError):
        two.generate([[5] * 8, [5] * 100_000], GREEDY, on_finish=ended.append)
    assert not ended
    with pytest.raises(NotFoundError):
        two.unload_adapter("nobody")
    with pytest.raises(InvalidRequestError, match="not a pooling model"):
        two.embed("Hello")

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        two.generate(TEXTS, GREEDY, on_finish=interrupt)
    assert two.generate([], GREEDY) == []
    assert said(two) == said(single)


def test_a_caller_may_have_an_event_loop_or_another_thread(two: LLM) -> None:
    expected = said(two)

    async def call() -> list[list[str]]:
        return said(two)

    async def call_on_a_thread() -> list[list[str]]:
        return await asyncio.to_thread(said, two)

    assert asyncio.run(call()) == asyncio.run(call_on_a_thread()) == expected


def test_an_engine_that_is_killed_costs_no_later_call(two: LLM) -> None:
    expected = said(two)
    killed = min(own_engines())
    os.kill(killed, signal.SIGKILL)
    while killed in own_engines():
        pass
    assert said(two) == expected


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("embed", lambda llm: [each.outputs.embedding for each in llm.embed(TEXTS)]),
        ("embed", lambda llm: [each.outputs.score for each in llm.score(TEXTS[0], TEXTS[1:])]),
        ("sentiment", lambda llm: [each.outputs.probs for each in llm.classify(TEXTS)]),
        ("reward", lambda llm: [each.outputs.data for each in llm.reward(TEXTS)]),
    ],
)
def test_results_of_pooling_models_are_those_of_one_engine(name: str, call: Any) -> None:
    with LLM(f"demo:{name}", data_parallel_size=2) as two:
        np.testing.assert_allclose(call(two), call(LLM(f"demo:{name}")), atol=1e-5)


def test_no_process_is_left(two: LLM) -> None:
    before = own_engines()
    closed = LLM("demo:embed", data_parallel_size=2)
    assert len(own_engines()) == len(before) + 2
    closed.close()
    assert own_engines() == before
    closed.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        closed.embed(TEXTS)
    collected = LLM("demo:embed", data_parallel_size=2)
    collected.embed(TEXTS)
    cycle: list[Any] = [collected]
    cycle.append(cycle)
    del collected, cycle
    gc.collect()
    # It ends on a thread, for which the next one waits.
    LLM("demo:embed").close()
    assert own_engines() == before
    with pytest.raises(Exception, match="no-such-folder"):
        LLM("./no-such-folder", data_parallel_size=2)
    assert own_engines() == before


def test_another_thread_may_be_the_last_that_has_it() -> None:
    before = own_engines()

    def use() -> None:
        LLM("demo:embed", data_parallel_size=2).embed(TEXTS)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    while own_engines() != before:
        sleep(0.05)


def test_dead_engines_answer_nothing() -> None:
    others = own_engines()
    llm = LLM("demo:embed", data_parallel_size=2)
    llm.embed(TEXTS)
    engines = own_engines() - others
    for engine in engines:
        os.kill(engine, signal.SIGKILL)

    def embed_until_an_error() -> None:
        while True:
            llm.embed(TEXTS)

    # The death of the first may be known before that of the second.
    with pytest.raises(EngineDeadError):
        embed_until_an_error()
    llm.close()
    assert not own_engines() & engines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 0}, "at least 1"),
        ({"data_parallel_devices": [0]}, "data_parallel_size above 1"),
        ({"data_parallel_size": 2, "data_parallel_devices": [0]}, "data-parallel-devices"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


# A script without a guard of __main__, which engine processes must not import.
SCRIPT = """
from mlx_parallm import LLM, SamplingParams
from mlx_parallm.config import CacheConfig
print("begun", flush=True)
llm = LLM(cache=CacheConfig(kv_cache_bytes=1 << 27), data_parallel_size=2)
print("loaded", flush=True)
params = SamplingParams(max_tokens=2, temperature=0.0)
while True:
    llm.generate(["1, 2, 3,"] * 8, params)
    print("answered", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_script_that_ends_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = ChildProcess(
        ["script"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**user_environment(), "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    assert lines == ["begun\n", "loaded\n", "answered\n"]
    engines = engines_of(process.pid)
    assert len(engines) == 2
    process.send_signal(number)
    more, log = process.communicate()
    assert "begun" not in more
    assert process.returncode != 0
    assert ("KeyboardInterrupt" in log) == (number == signal.SIGINT)
    while not are_gone(engines):
        sleep(0.05)


def test_all_engines_sleep_and_wake(two: LLM) -> None:
    before = said(two)
    for level in (1, 2):
        two.sleep(level)
        with pytest.raises(InvalidRequestError, match="asleep"):
            said(two)
        two.wake_up()
        assert said(two) == before
