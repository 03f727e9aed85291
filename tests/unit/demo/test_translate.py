"""The translator's data, its tokenizer and its training."""

from __future__ import annotations

import argparse
import datetime
import itertools
from pathlib import Path
from random import Random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_map

from demo.translate import train
from demo.translate.batches import (
    FIRST_DIGITS,
    MULTIPLE,
    POOL,
    POOLS_PER_DIGIT,
    Batch,
    Ids,
    batches,
)
from demo.translate.evaluate import greedy, held_out, translate, wrong
from demo.translate.items import (
    DIGITS,
    DIRECTIONS,
    KINDS,
    LANGUAGES,
    MAX_DIGITS,
    Direction,
    Value,
    draw,
    split_of,
    texts,
)
from demo.translate.language import Money
from demo.translate.network import (
    Stack,
    TrainedT5,
    load_model,
    model_config,
    named_weights,
    new_model,
    orient_heads,
    save_model,
)
from demo.translate.train import Trainer
from demo.translate.vocabulary import EOS_ID, PAD_ID, UNK_ID, new_tokenizer

NUMBERS = st.integers(0, 999_999)
VALUES = st.one_of(
    NUMBERS,
    st.dates(datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)),
    st.builds(Money, st.sampled_from(("€", "$")), NUMBERS),
)
TOKENIZER = new_tokenizer()
TINY = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2}


def tiny_config() -> dict:
    return model_config(TOKENIZER.get_vocab_size()) | TINY


def tiny_batch() -> Batch:
    return next(batches(TOKENIZER, 8, seed=1))


def test_texts_in_digits():
    assert texts(1984)[DIGITS] == "1,984"
    assert texts(datetime.date(1984, 5, 3))[DIGITS] == "1984-05-03"
    assert texts(Money("$", 190_500))[DIGITS] == "$1,905.00"


def test_prefixes_are_those_of_t5():
    assert Direction(DIGITS, "de").prefix == "translate digits to German: "
    assert Direction("fr", DIGITS).prefix == "translate French to digits: "
    assert len(set(DIRECTIONS)) == 2 * len(LANGUAGES)


@given(VALUES)
def test_every_text_survives_the_tokenizer_without_unknown_pieces(value: Value):
    for text in texts(value).values():
        ids = TOKENIZER.encode(text).ids
        assert UNK_ID not in ids
        assert ids[-1] == EOS_ID
        assert TOKENIZER.decode(ids) == text


def test_a_prefix_is_two_pieces():
    for direction in DIRECTIONS:
        assert len(TOKENIZER.encode(direction.prefix.rstrip()).ids) == 3


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("7", "▁ 7"),
        ("12,005", "▁ 1 2 , 0 0 5"),
        ("1984-05-30", "▁ 1 9 8 4 - 0 5 - 3 0"),
        ("$1,905.07", "▁ $ 1 , 9 0 5 . 0 7"),
        ("siebenundsiebzig", "▁sieben und siebzig"),
        ("einhunderteins", "▁ein hundert eins"),
        ("quatre-vingt-dix-sept", "▁quatre-vingt -dix-sept"),
        ("twenty-first,", "▁twenty -first ,"),
    ],
)
def test_pieces_are_digits_and_morphemes(text: str, pieces: str):
    assert TOKENIZER.encode(text).tokens == [*pieces.split(), "</s>"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_value_in_twenty_is_held_out_and_never_trained_on(kind: str):
    rng = Random(1)
    drawn = [KINDS[kind](rng, MAX_DIGITS) for _ in range(2_000)]
    share = sum(split_of(value) == "held_out" for value in drawn) / len(drawn)
    assert 0.02 < share < 0.08
    assert split_of(draw(rng, kind, "train")) == "train"
    values = held_out(kind, 50, seed=0)
    assert len(set(values)) == 50
    assert {split_of(value) for value in values} == {"held_out"}


def test_what_other_numbers_are_made_of_is_trained_on():
    assert {split_of(value) for value in range(100)} == {"train"}
    assert {split_of(Money("€", value)) for value in range(100)} == {"train"}


def source_ids(direction: Direction, value: Value) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(direction.prefix + texts(value)[direction.source]).ids)


def without_padding(ids: Ids) -> set[tuple[int, ...]]:
    return {tuple(token for token in row if token != PAD_ID) for row in ids.tolist()}


def test_batches_have_only_training_values_and_few_lengths():
    # Short numbers begin the training, so that equal ones would occur in both.
    values = [value for value in range(100, 1000) if split_of(value) == "held_out"]
    held = {source_ids(direction, value) for value in values for direction in DIRECTIONS}
    trained = {source_ids(direction, 100) for direction in DIRECTIONS}
    seen: set[tuple[int, ...]] = set()
    for batch in itertools.islice(batches(TOKENIZER, 64, seed=1), 100):
        assert batch.sources.shape[1] % MULTIPLE == batch.targets.shape[1] % MULTIPLE == 0
        seen |= without_padding(batch.sources)
    assert trained <= seen
    assert not seen & held


def test_numbers_get_longer_and_dates_come_later():
    pools = POOLS_PER_DIGIT * (MAX_DIGITS - FIRST_DIGITS)
    source = batches(TOKENIZER, 2, seed=1)
    first = next(source)
    last = list(itertools.islice(source, POOL * (pools + 1)))[-POOL:]
    dash = TOKENIZER.token_to_id("-")
    assert not (first.sources == dash).any()
    assert any((batch.sources == dash).any() for batch in last)
    assert max(batch.targets.shape[1] for batch in last) > first.targets.shape[1]


def attended(stack: Stack, head: int, *, length: int = 9, place: int = 4) -> np.ndarray:
    """Return the shares that a row without content gives to each place."""
    distances = mx.arange(length) - place
    return np.array(mx.softmax(stack.bias_table(stack.buckets(distances))[:, head]))


def test_heads_begin_with_a_sense_of_order():
    model = new_model(tiny_config(), seed=1)
    orient_heads(model)
    following, preceding, later, earlier = (attended(model.encoder, head) for head in range(4))
    assert following[5] > 0.8
    assert preceding[3] > 0.8
    assert later[5:].sum() > 0.95
    assert earlier[:4].sum() > 0.95
    own, before = (attended(model.decoder, head, length=5) for head in range(2))
    assert own[4] > 0.8
    assert before[3] > 0.8


def trained(folder: Path, *arguments: str) -> dict[str, mx.array]:
    """Return the weights of a training that ends before its first step."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    train.main(parser.parse_args(["--out", str(folder), "--minutes", "1e-9", *arguments]))
    return named_weights(load_model(folder))


def test_training_goes_on_from_a_stored_model(tmp_path: Path):
    first = trained(tmp_path / "first", "--seed", "1")
    later = trained(tmp_path / "later", "--seed", "2", "--resume", str(tmp_path / "first"))
    other = trained(tmp_path / "other", "--seed", "2")
    assert first.keys() == later.keys() == other.keys()
    assert all(mx.array_equal(weight, later[name]) for name, weight in first.items())
    assert not mx.array_equal(first["shared.weight"], other["shared.weight"])


def test_padding_changes_nothing():
    model = new_model(tiny_config(), seed=1)
    sources, targets = (mx.array(ids) for ids in tiny_batch())
    pad = [(0, 0), (0, 5)]
    expected = model(sources, targets)
    padded = model(mx.pad(sources, pad), mx.pad(targets, pad))[:, : targets.shape[1]]
    assert mx.allclose(padded, expected, atol=1e-4)


def test_a_decoder_row_sees_no_later_one():
    model = new_model(tiny_config(), seed=1)
    sources, targets = (mx.array(ids) for ids in tiny_batch())
    changed = mx.concatenate([targets[:, :3], targets[:, 3:] * 0 + 7], axis=1)
    difference = np.array(model(sources, changed) - model(sources, targets))
    assert abs(difference[:, :3]).max() < 1e-4
    assert abs(difference[:, 3:]).max(axis=(0, 2)).min() > 1e-2


def test_training_learns_a_batch_and_storage_keeps_it(tmp_path: Path):
    config, batch = tiny_config(), tiny_batch()
    trainer = Trainer(new_model(config, seed=1), learning_rate=2e-2)
    losses = [np.array(trainer.step(batch, 0.0, 200))[0] for _ in range(60)]
    assert losses[-1] < 0.3 * losses[0]
    save_model(trainer.model, config, tmp_path)
    stored = load_model(tmp_path)
    rounded = tree_map(
        lambda weight: weight.astype(mx.bfloat16).astype(mx.float32), trainer.model.parameters()
    )
    trainer.model.update(rounded)
    sources, targets = (mx.array(ids) for ids in batch)
    assert mx.array_equal(stored(sources, targets), trainer.model(sources, targets))


def test_greedy_decoding_ends_at_the_end_token():
    model = TrainedT5(tiny_config())
    model.update(tree_map(mx.zeros_like, model.parameters()))
    # Equal logits: the first id, which is the padding, again and again to the limit.
    assert [set(ids) for ids in greedy(model, [[5, EOS_ID]])] == [{PAD_ID}]
    weight = mx.zeros(named_weights(model)["shared.weight"].shape)
    weight[EOS_ID] = 1.0
    model.shared.weight = weight + 0.01
    model.decoder.final_layer_norm.weight = mx.ones((TINY["d_model"],))
    assert greedy(model, [[5, EOS_ID], [6, 7, EOS_ID]]) == [[], []]


def test_only_exact_translations_count():
    model = new_model(tiny_config(), seed=1)
    direction = DIRECTIONS[0]
    values: list[Value] = [1984]
    [made] = translate(model, TOKENIZER, [direction.prefix + "1,984"])
    assert wrong(model, TOKENIZER, direction, values) == [
        (made, "one thousand nine hundred eighty-four")
    ]
