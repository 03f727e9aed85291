"""Encoder-decoders through the runner: a batch gives each request what it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.types.model_input import InputKind, source_of
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.inputs.sources import NOT_FINITE
from tests.compiled_attention import AheadAttention, CompiledAttention
from tests.frames_model import VOCAB_SIZE, frames_model, frames_of
from tests.source_batches import (
    BLOCK_SIZE,
    Batch,
    Request,
    Running,
    adapter_of,
    alone,
    assert_same,
    frames_source,
    merged,
    new_runner,
    note,
    random_text,
    same,
    tiny_t5,
)

#: ``BAD_TOKEN``: a token whose embedding is made NaN.
BAD_TOKEN = 3


def requests_of(seed: int, count: int = 12) -> list[Request]:
    rng = random.Random(seed)
    lengths = [1, 600, 33, 4, 17, 150, 2, 64, 9, 301, 5, 40][:count]
    rng.shuffle(lengths)
    return [
        Request(source_of(random_text(rng, length)), random_text(rng, rng.choice([1, 1, 2, 7, 40])))
        for length in lengths
    ]


@pytest.mark.parametrize("attention", [ReferenceAttention, AheadAttention, CompiledAttention])
@pytest.mark.parametrize("seed", [1])
def test_a_batch_gives_each_request_what_it_gets_alone(seed: int, attention: Any) -> None:
    loaded = tiny_t5()
    requests = requests_of(seed)
    expected = [alone(loaded, request) for request in requests]
    assert len({token for answer in expected for token, _ in answer}) > 12
    assert_same(Batch(new_runner(loaded, attention(BLOCK_SIZE)), seed=seed).run(requests), expected)


def t5_adapter(seed: int, *, half: str) -> AdapterWeights:
    """Return an adapter of the encoder, of what projects its output, or of the decoder."""
    width = (32, 32)
    paths = {
        "encoder": {
            "encoder.block.0.layer.0.SelfAttention.q": width,
            "encoder.block.1.layer.1.DenseReluDense.wo": (32, 48),
        },
        "cross": {
            "decoder.block.0.layer.1.EncDecAttention.k": width,
            "decoder.block.2.layer.1.EncDecAttention.v": width,
        },
        "decoder": {
            "decoder.block.1.layer.0.SelfAttention.k": width,
            "decoder.block.1.layer.1.EncDecAttention.q": width,
        },
    }
    return adapter_of(paths[half], seed)


@pytest.mark.parametrize("attention", [ReferenceAttention, CompiledAttention])
def test_each_source_and_its_rows_have_the_adapter_of_the_request(attention: Any) -> None:
    plain = tiny_t5()
    halves = {
        slot: t5_adapter(slot, half=half)
        for slot, half in enumerate(("encoder", "cross", "decoder"), 1)
    }
    requests, expected = [], []
    for number, request in enumerate(requests_of(5)):
        slot = number % 4
        adapter = halves.get(slot)
        loaded = tiny_t5()
        if adapter is not None:
            merged(loaded, adapter)
        own = replace(request, adapter_slot=slot, adapter=adapter and adapter.digest)
        requests.append(own)
        expected.append(alone(loaded, own))
        if adapter is not None:
            assert not same(expected[-1], alone(plain, own), atol=1e-2)
    runner = new_runner(plain, attention(BLOCK_SIZE))
    for adapter in halves.values():
        runner.adapters.add(adapter.digest, adapter)
    assert_same(Batch(runner, seed=3).run(requests), expected)


def frames_requests(seed: int) -> list[Request]:
    """Return requests of which those of equal lengths may be computed together."""
    rng = random.Random(seed)
    lengths = [1, 64, 7, 7, 7, 30, 30, 2]
    return [
        Request(
            frames_source(frames_of(length, seed=number), shape_key=f"frames {length}"),
            random_text(rng, rng.choice([1, 2, 9]), VOCAB_SIZE),
        )
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("attention", [ReferenceAttention, CompiledAttention])
def test_sources_may_be_frames_of_numbers(attention: Any) -> None:
    plain, adapted = frames_model(), frames_model()
    adapter = adapter_of({"encoder.v": (16, 32), "read": (32, 12)}, seed=1)
    merged(adapted, adapter)
    requests = frames_requests(2)
    for number in (3, 5):
        requests[number] = replace(requests[number], adapter_slot=1, adapter=adapter.digest)
    expected = [alone(adapted if each.adapter else plain, each) for each in requests]
    assert not same(expected[3], alone(plain, requests[3]), atol=1e-2)
    runner = new_runner(plain, attention(BLOCK_SIZE))
    assert runner.info.input_kinds == (InputKind.SOURCE,)
    assert runner.info.num_tower_stages == 3
    runner.adapters.add(adapter.digest, adapter)
    assert_same(Batch(runner, seed=4).run(requests), expected)


@pytest.mark.parametrize("attention", [ReferenceAttention, AheadAttention, CompiledAttention])
def test_a_source_that_is_not_finite_fails_alone_and_leaves_nothing_behind(attention: Any) -> None:
    loaded, rng = tiny_t5(), random.Random(1)
    texts = [[4 + token % 90 for token in random_text(rng, 20)] for _ in range(6)]
    requests = [Request(source_of(text), (5,)) for text in texts]
    expected = [alone(loaded, each) for each in requests]
    assert all(token != BAD_TOKEN for answer in expected for token, _ in answer)
    bad = Request(source_of([5, BAD_TOKEN, 7, 8, 9]), (5,))
    batch = Batch(new_runner(loaded, attention(BLOCK_SIZE), num_blocks=60), num_blocks=60)
    loaded.model.shared.weight[BAD_TOKEN] = float("nan")
    first = batch.start(bad)
    others = [batch.start(each) for each in requests[:2]]
    members = [others[0], first, others[1]]
    outputs = [
        batch.submit([batch.row(each) for each in members], stages=(batch.stages(members),)).wait()
    ]
    assert outputs[0].failed == {first.seq_id: NOT_FINITE}
    assert {token.seq_id for token in outputs[0].tokens} == {each.seq_id for each in others}
    # Later requests find the blocks by content, and fail too.
    again = Running(bad, 99, first.source_blocks, first.blocks)
    assert batch.submit([batch.row(again)]).wait().failed == {99: NOT_FINITE}
    # Another request gets the blocks, of which it fills only a part, and finds its source.
    heir = Running(requests[0], 100, others[0].source_blocks, first.source_blocks)
    for _ in range(requests[0].num_tokens):
        note(batch.submit([batch.row(heir)]).wait(), {100: heir})
    assert_same([heir.answer], expected[:1])
