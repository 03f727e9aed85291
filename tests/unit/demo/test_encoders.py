"""The training data of the package's encoders, and training, which learns and stores it."""

import json
import re
from itertools import islice
from pathlib import Path
from random import Random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from demo.checks import is_right
from demo.compose import TASKS
from demo.encoders import embed, facts, masked_lm, reviews, reward, sentences, sentiment
from demo.encoders.answers import EXERCISES, answer_pair
from demo.encoders.batches import by_length, rows
from demo.encoders.evaluate import Stored
from demo.encoders.networks import (
    MAX_LENGTH,
    new_model,
    save,
    save_sentence_transformers,
)
from demo.encoders.tokenizers import CLS_ID, MASK_ID, SEP_ID, word_pieces
from demo.encoders.tokenizers import save as save_tokenizer
from demo.encoders.train import RECIPES
from demo.encoders.training import WARMUP_STEPS, fit, rate
from demo.example import Example
from mlx_parallm.config import LoadingConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDERS, DEMO_NAME, demo_folder
from mlx_parallm.engine.sources import ModelSources
from mlx_parallm.models.checkpoints.sentence_transformers import read_vector_spec
from mlx_parallm.numerics.attention import softmax_attention
from mlx_parallm.types.errors import ModelLoadError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    rng = Random(0)
    return word_pieces((sentences.sentence(rng, "train") for _ in range(1500)), 600)


def clauses(text: str) -> set[str]:
    return set(text.lower().replace(".", " ").replace(",", " ").split())


@given(st.integers(0, 2**32))
def test_held_out_reviews_are_about_other_things_in_other_words(seed: int):
    held = reviews.HELD_OUT_WORDS
    words = clauses(reviews.review(Random(seed), "held_out").text)
    assert not words & set(reviews.TRAIN_WORDS.things)
    trained = clauses(reviews.review(Random(seed), "train").text)
    assert not trained & set(held.things)
    turned = {*held.adjectives[0], *held.adjectives[1]} & trained
    # Words are learnt from plain sentences only, where nothing negates them.
    assert not turned or not trained & {"not", "but", "although", "never", "agree", "wrong"}
    single = reviews.single_clause(Random(seed)).text
    assert single.count(".") == 1
    assert not clauses(single) & {*held.things, "although", "agree", "wrong"}


def test_no_word_tells_the_sentiment():
    rng = Random(0)
    drawn = [reviews.review(rng, "held_out") for _ in range(4000)]
    for word in ("not", "but", "although", "perfect", "useless", "loved", "hated", "wrong"):
        labels = [example.label for example in drawn if word in clauses(example.text)]
        assert 0.2 < sum(labels) / len(labels) < 0.8, word


DENIALS = ("not", "never", "hardly", "far", "anything", "nobody", "nothing")
BOTH = (reviews.TRAIN_WORDS, reviews.HELD_OUT_WORDS)
PRAISE = {word for words in BOTH for word in words.adjectives[1]} | {
    form for pair in reviews.TRAIN_WORDS.verbs[1] for form in pair
}
BLAME = {word for words in BOTH for word in words.adjectives[0]} | {
    form for pair in reviews.TRAIN_WORDS.verbs[0] for form in pair
}


def judged(clause: str) -> int:
    """Return the sentiment of a clause, found in another way than it was made."""
    words = clauses(clause)
    assert bool(words & PRAISE) != bool(words & BLAME), clause
    return int(bool(words & PRAISE) != any(word in words for word in DENIALS))


@given(st.integers(0, 2**32), st.integers(0, 1))
def test_a_clause_says_what_its_label_says(seed: int, label: int):
    writer = reviews.Writer(Random(seed), reviews.TRAIN_WORDS, "train")
    assert judged(writer.clause(label)) == judged(writer.plain(label)) == label
    assert judged(writer.one(label)) == label


@given(st.integers(0, 2**32), st.integers(0, 1))
def test_in_a_contrast_the_clause_that_counts_has_the_sentiment(seed: int, label: int):
    text = reviews.Writer(Random(seed), reviews.TRAIN_WORDS, "held_out").contrast(label).lower()
    first, second = re.split(r", but |\. but |\. still, |\. in the end |, although |"
                             r",? even though |(?<!all), (?!although|even)", text, maxsplit=1) \
        if not text.startswith(("although", "even though", "all in all")) else \
        text.removeprefix("all in all, ").split(", ", 1)  # fmt: skip
    yields = re.search(r"although|even though", text)
    begins = yields is not None and yields.start() == 0
    counts = second if begins or yields is None else first
    assert judged(counts) == label
    assert judged(first) != judged(second)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_no_query_is_about_the_fact_of_another_pair(split):
    pairs = facts.pairs(Random(3), 120, split)
    assert len(pairs) == 120
    for pair in pairs:
        assert pair.query != pair.statement
        assert sum(pair.fits(other.fact) for other in pairs) == 1
    if split == "train":
        assert {pair.fact.split for pair in pairs} == {"train"}
    assert {pair.fact.relation for pair in pairs} == set(facts.RELATIONS)


def test_half_of_the_facts_are_near_another():
    for first, second in zip(*[iter(facts.pairs(Random(5), 60, "train"))] * 2, strict=True):
        assert first.fact.relation == second.fact.relation
        changed = set(first.fact.values) ^ set(second.fact.values)
        assert len(changed) in (2, 4)


def test_attention_of_encoders_has_the_gradient_of_mlx():
    mx.random.seed(0)
    arrays = [mx.random.normal((4, 4, 32, 16)) for _ in range(3)]
    mask = mx.arange(32)[None, None, None] < mx.array([32, 20, 9, 1])[:, None, None, None]

    def gradients(attention):
        def total(*inputs):
            mixed = attention(*inputs, scale=0.25, mask=mask)
            return (mixed * mx.cos(mx.arange(mixed.size).reshape(mixed.shape))).sum()

        return mx.grad(total, argnums=(0, 1, 2))(*arrays)

    for own, other in zip(
        gradients(softmax_attention), gradients(mx.fast.scaled_dot_product_attention), strict=True
    ):
        assert mx.allclose(own, other, atol=1e-5)


def test_articles_fit():
    fact = facts.Fact("pet", (("a", "Anna"), ("b", "Ben"), ("k", "owl"), ("c", "orange")))
    texts = {facts.pair(Random(seed), fact).statement for seed in range(30)}
    assert "Anna has an orange owl called Ben." in texts


@pytest.mark.parametrize("kind", sentences.KINDS)
def test_sentences_of_either_split_differ(kind: str):
    rng = Random(1)
    trained = {sentences.sentence_of(kind, rng, "train") for _ in range(50)}
    held_out = {sentences.sentence_of(kind, rng, "held_out") for _ in range(5)}
    assert not trained & held_out
    assert all(text[0] == text[0].upper() for text in trained)


@pytest.mark.parametrize("task", EXERCISES)
def test_wrong_answers_are_wrong_and_right_ones_right(task: str):
    rng = Random(2)
    for _ in range(40):
        pair = answer_pair(rng, "held_out", task)
        example = Example(
            task=task,
            key="",
            messages=pair.messages,
            answer=pair.right,
            check=TASKS[task](Random(0)).check,
        )
        assert is_right(example, pair.right)
        assert not is_right(example, pair.wrong)
        assert pair.wrong


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 300))
def test_batches_hold_everything_once_and_keep_to_the_budget(lengths: list[int], budget: int):
    batches = by_length(lengths, budget)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[place] for place in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget


def test_masks_hide_what_is_asked_for(tokenizer: Tokenizer):
    encoded = [tokenizer.encode("The capital of France is Paris.").ids, tokenizer.encode("No").ids]
    masked, places, hidden = masked_lm.masked(Random(0), encoded)
    ids = np.array(masked.ids).reshape(-1)
    assert (ids[np.array(places)] == MASK_ID).all()
    ids[np.array(places)] = np.array(hidden)
    width = masked.ids.shape[1]
    begins = [row * width for row in range(len(encoded))]
    assert [
        ids[begin : begin + len(tokens)].tolist()
        for begin, tokens in zip(begins, encoded, strict=True)
    ] == encoded
    assert len(set(np.array(places) // width)) == 2


def test_faults_are_where_a_wrong_answer_leaves_the_right_one():
    right = [CLS_ID, 9, SEP_ID, 11, 12, SEP_ID]
    changed = [CLS_ID, 9, SEP_ID, 12, 12, SEP_ID]
    lost = [CLS_ID, 9, SEP_ID, 12, SEP_ID]
    made = reward.batch([(right, changed), (right, lost)])
    assert np.array(made.faults)[:, :6].tolist() == [
        [0] * 6, [0] * 6, [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 0, 0],
    ]  # fmt: skip
    assert np.array(made.answers)[:, :6].tolist() == [
        [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0],
    ]  # fmt: skip


def test_chats_are_encoded_as_the_tokenizer_encodes_pairs(tokenizer: Tokenizer):
    chat = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3"}]
    assert reward.encode(tokenizer, [chat]) == [tokenizer.encode("1 + 2?", "3").ids]
    template = ImmutableSandboxedEnvironment().from_string(reward.CHAT_TEMPLATE)
    assert template.render(messages=chat) == reward.rendered(chat)


def test_the_learning_rate_rises_and_falls():
    rates = [rate(number, 1000, 0.5) for number in range(1000)]
    top = rates.index(max(rates))
    assert top in (WARMUP_STEPS - 1, WARMUP_STEPS)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 <= rates[-1] < 1e-5 < 0.45 < rates[top] <= 0.5


@pytest.mark.parametrize("name", ["mlm", "sentiment", "embed"])
def test_training_lowers_the_loss(name: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    for module in (masked_lm, sentiment):
        monkeypatch.setattr(module, "POOL", 64)
    monkeypatch.setattr(embed, "PAIRS", 16)
    recipe = RECIPES[name]
    config = {**recipe.config(tokenizer), "hidden_size": 32, "intermediate_size": 32}
    model = new_model({**config, "num_hidden_layers": 1}, seed=0)
    stage = recipe.stages[-1]
    held = next(stage.batches(tokenizer, 1))
    before = float(stage.loss(model, held))
    fit(model, stage.loss, iter([held] * 40), steps=40, learning_rate=2e-2)
    assert float(stage.loss(model, held)) < 0.9 * before


def test_the_judge_first_fills_masks_in_answers_only(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reward, "POOL", 8)
    filled, places, hidden = next(reward.filling_batches(tokenizer, 1))
    ids = np.array(filled.ids)
    assert max(map(len, ids)) <= MAX_LENGTH
    for row in range(len(ids)):
        masks = np.flatnonzero(ids[row] == MASK_ID)
        assert masks.min() > np.flatnonzero(ids[row] == SEP_ID).min()
    judge = reward.Judge(new_model({**reward.config(tokenizer), "num_hidden_layers": 1}, seed=0))
    batch = filled, places, hidden
    before = float(reward.filling_loss(judge, batch))
    fit(judge, reward.filling_loss, iter([batch] * 12), steps=12, learning_rate=2e-2)
    assert float(reward.filling_loss(judge, batch)) < 0.8 * before


def test_the_judge_learns_and_its_probe_is_not_stored(tokenizer: Tokenizer, tmp_path: Path):
    config = {**reward.config(tokenizer), "num_hidden_layers": 1}
    model = new_model(config, seed=0)
    judge = reward.Judge(model)
    pairs = reward.encoded_pairs(tokenizer, [answer_pair(Random(0), "train", "smalltalk")])
    batch = reward.batch(pairs)
    fit(judge, reward.loss, iter([batch] * 40), steps=40, learning_rate=5e-3)
    right, wrong = np.array(judge(batch.texts)[0]).tolist()
    assert right > wrong
    save(model, config, tmp_path)
    save_tokenizer(tokenizer, tmp_path, MAX_LENGTH, reward.CHAT_TEMPLATE)
    stored = Stored(tmp_path)
    scores = stored.model.sequence_logits(stored.model(batch.texts.ids, batch.texts.mask))
    assert scores.shape == (2, 1)
    assert np.allclose(np.array(scores)[:, 0], [right, wrong], atol=2e-2)


def test_a_stored_embedder_is_a_folder_of_sentence_transformers(
    tokenizer: Tokenizer, tmp_path: Path
):
    config = {**embed.config(tokenizer), "num_hidden_layers": 1}
    model = new_model(config, seed=0)
    save(model, config, tmp_path)
    save_tokenizer(tokenizer, tmp_path, MAX_LENGTH)
    save_sentence_transformers(tmp_path, embed.DIMS)
    spec = read_vector_spec(tmp_path)
    assert (spec.poolings, spec.normalizes, spec.max_model_len) == (("mean",), True, MAX_LENGTH)
    names = mx.load(str(tmp_path / "model.safetensors"))
    assert isinstance(names, dict)
    assert "embeddings.word_embeddings.weight" in names
    inputs = rows([[2, 9, 11, 3], [2, 9, 3]])
    again = embed.vectors(Stored(tmp_path).model, inputs)
    assert np.allclose(np.array(again), np.array(embed.vectors(model, inputs)), atol=5e-3)


def test_training_data_come_from_the_seed(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sentiment, "POOL", 64)

    def first(seed: int) -> np.ndarray:
        return np.array(next(sentiment.batches(tokenizer, seed))[0].ids)

    assert np.array_equal(first(1), first(1))
    assert first(1).shape != first(2).shape or not np.array_equal(first(1), first(2))
    texts = [pair.query for pair in islice(facts.pairs(Random(1), 10, "train"), 10)]
    assert texts == [pair.query for pair in facts.pairs(Random(1), 10, "train")]
    rng = Random(0)
    again = word_pieces((sentences.sentence(rng, "train") for _ in range(1500)), 600)
    assert again.to_str() == tokenizer.to_str()


def test_models_of_the_package_have_names():
    assert demo_folder("org/name") is None
    for name, folder in DEMO_FOLDERS.items():
        assert demo_folder(name) == folder
        config = json.loads((folder / "config.json").read_text())
        assert config.get("architectures") or config["model_type"] == "mlx_parallm_net"
    assert DEMO_NAME in DEMO_FOLDERS
    assert ModelSources(LoadingConfig(), []).resolve("demo:embed") == "demo:embed"
    with pytest.raises(ModelLoadError, match="demo:mlm, demo:sentiment, demo:embed, demo:reward"):
        demo_folder("demo:other")
