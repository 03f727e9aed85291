"""Encoder-decoders through the runner: a batch gives each request what it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.models.seq2seq.dense_cache import set_source
from mlx_parallm.types.model_input import InputKind, source_of
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from mlx_parallm.worker.attention.quantised_reference import QuantisedReferenceAttention
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.inputs.sources import NOT_FINITE
from mlx_parallm.worker.weights.loader import LoadedModel
from tests.compiled_attention import AheadAttention, CompiledAttention
from tests.frames_model import VOCAB_SIZE, frames_model, frames_of
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import MetalShim
from tests.source_batches import (
    BLOCK_SIZE,
    T5_VOCAB,
    Batch,
    Request,
    Running,
    adapter_of,
    alone,
    arrays_of,
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
    # So does one whose KV a store had: its first block is that of the bad source.
    read = batch.runner.read_blocks(others[1].source_blocks[:1]).wait()
    batch.runner.write_blocks(first.source_blocks[:1], read).wait()
    blocks = (first.source_blocks[0], *others[1].source_blocks[1:])
    heir = Running(requests[1], 101, blocks, first.blocks)
    for _ in range(requests[1].num_tokens):
        note(batch.submit([batch.row(heir)]).wait(), {101: heir})
    assert_same([heir.answer], expected[1:2])


def test_quantised_kv_gives_a_batch_what_each_request_gets_alone() -> None:
    attention = QuantisedReferenceAttention(BLOCK_SIZE, KVQuantisation(bits=8, group_size=32))
    loaded = tiny_t5(d_kv=32)
    runner = new_runner(loaded, attention)
    requests = requests_of(11, count=8)
    single = [Batch(runner, seed=number).run([each])[0] for number, each in enumerate(requests)]
    assert not any(map(same, single, (alone(loaded, each) for each in requests)))
    assert_same(Batch(runner, seed=2).run(requests), single)


def logprobs_of(loaded: LoadedModel, request: Request) -> np.ndarray:
    """Return the log-probabilities after each token of a decoder prompt, ``[L, vocab]``."""
    caches = make_prompt_cache(loaded.model)
    set_source(loaded.model, caches, arrays_of(request.source))
    logits = loaded.model(mx.array([request.prompt]), cache=caches)[0]
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("attention", [ReferenceAttention, CompiledAttention])
def test_targets_are_scored_beside_rows_that_decode(attention: Any) -> None:
    loaded = tiny_t5()
    batch = Batch(new_runner(loaded, attention(BLOCK_SIZE)))
    requests = [Request(source_of(random_text(random.Random(n), 9 * n)), ()) for n in (1, 2, 3)]
    pairs = [
        replace(each, prompt=random_text(random.Random(n), 5 + 14 * n))
        for n, each in enumerate(requests)
    ]
    beside = batch.start(requests_of(1)[0])
    started = [batch.start(each) for each in pairs]
    batch.submit([], stages=(batch.stages([beside, *started]),))
    rows = [
        replace(batch.row(each), sample=None, prompt_logprobs=0, target_ids=each.request.prompt[1:])
        for each in started
    ]
    output = batch.submit([batch.row(beside), *rows]).wait()
    for each in started:
        expected = logprobs_of(loaded, each.request)
        targets = each.request.prompt[1:]
        scored = output.prompt_logprobs[each.seq_id]
        assert [entry.token_id for entry in scored] == list(targets)
        wanted = expected[np.arange(len(targets)), targets]
        np.testing.assert_allclose([entry.logprob for entry in scored], wanted, atol=1e-3)


@pytest.mark.parametrize("num_right", range(4))
@pytest.mark.parametrize("attention", [ReferenceAttention, CompiledAttention])
def test_proposals_are_verified_over_the_source(num_right: int, attention: Any) -> None:
    loaded = tiny_t5()
    batch = Batch(new_runner(loaded, attention(BLOCK_SIZE)))
    first, other = (batch.start(each) for each in requests_of(3)[:2])
    answers = [alone(loaded, each.request) for each in (first, other)]
    by_id = {each.seq_id: each for each in (first, other)}
    batch.submit([], stages=(batch.stages([first, other]),))
    for _ in range(2):
        note(batch.submit([batch.row(first), batch.row(other)]).wait(), by_id)
    row = batch.row(first)
    proposals = [token for token, _ in answers[0][2:5]]
    for index in range(num_right, len(proposals)):
        proposals[index] = (proposals[index] + 1) % 90
    assert row.sample is not None
    verify = tuple(replace(row.sample, position=row.sample.position + i) for i in (1, 2, 3))
    row = replace(
        row, token_ids=(*row.token_ids, *proposals), verify=verify, block_table=first.blocks
    )
    note(batch.submit([batch.row(other), row]).wait(), by_id)
    assert_same([first.answer, other.answer], [answers[0][: 3 + num_right], answers[1][:3]])


@pytest.mark.parametrize(
    ("make", "bits"),
    [
        (frames_model, None),
        pytest.param(tiny_t5, None, marks=pytest.mark.slow),
        pytest.param(tiny_t5, 8, marks=pytest.mark.slow),
    ],
)
def test_kernels_give_a_batch_what_each_request_gets_alone(
    make: Any, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_compiler()
    # The shim runs a kernel at once, which a function that MLX traces may not.
    monkeypatch.setattr(mx, "compile", lambda function, **_: function)
    scheme = None if bits is None else KVQuantisation(bits=bits, group_size=32)
    attention = KernelAttention(BLOCK_SIZE, MetalShim(), quantisation=scheme)
    if make is frames_model:
        loaded, requests = frames_model(), frames_requests(3)
    else:
        loaded, requests = tiny_t5(d_kv=32), requests_of(6, count=5)
    runner = new_runner(loaded, attention)
    assert runner.info.is_compiled
    expected = [alone(loaded, each) for each in requests]
    if bits is not None:
        expected = [Batch(runner, seed=5).run([each])[0] for each in requests]
    assert_same(Batch(runner, seed=1).run(requests), expected)


@pytest.mark.parametrize("attention", [ReferenceAttention, CompiledAttention])
def test_adapters_of_the_shared_embedding_change_sources_and_decoder_tokens(attention: Any) -> None:
    numbers = np.random.default_rng(2)
    change = LowRank(
        kind="embedding",
        a=HostTensor(numbers.normal(0, 0.5, (4, T5_VOCAB)).astype(np.float32)),
        b=HostTensor(numbers.normal(0, 0.5, (32, 4)).astype(np.float32)),
        scale=1.0,
    )
    adapter = AdapterWeights({"shared": change})
    plain, changed = tiny_t5(), tiny_t5()
    table = changed.model.shared
    table.weight = table.weight + (to_mlx(change.b) @ to_mlx(change.a)).T
    runner = new_runner(plain, attention(BLOCK_SIZE))
    runner.adapters.add(adapter.digest, adapter)
    requests = requests_of(9, count=8)
    for number in (0, 3, 4, 7):
        requests[number] = replace(requests[number], adapter_slot=1, adapter=adapter.digest)
    expected = [alone(changed if each.adapter else plain, each) for each in requests]
    assert not same(expected[0], alone(plain, requests[0]), atol=1e-2)
    assert_same(Batch(runner, seed=8).run(requests), expected)
