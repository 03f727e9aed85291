"""Training, storage and decoding, on a model small enough for a unit test."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3

from demo.chat_format import END_OF_TEXT, IM_END, token_id
from demo.decoding import greedy
from demo.network import load_float32, model_config, named_weights, save_quantized
from demo.packing import ROW_LENGTH, PackedRows, batches
from demo.tokenizer_training import save_tokenizer, train_tokenizer
from demo.train import ConversationMask, Trainer, progress_by
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.types.errors import ConfigError

VOCAB, LENGTH = 128, 24


def tiny_config() -> dict:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    return {**model_config(VOCAB, eos_id=1, pad_id=0), **sizes}


@pytest.fixture
def model() -> qwen3.Model:
    mx.random.seed(0)
    return qwen3.Model(qwen3.ModelArgs.from_dict(tiny_config()))


def counting_batch() -> PackedRows:
    tokens = (np.arange(LENGTH)[None, :] + np.arange(4)[:, None] * 10 + 2).astype(np.uint16)
    weights = np.ones((4, LENGTH), np.bool_)
    weights[:, -1] = False
    return PackedRows(tokens, np.roll(tokens, -1, axis=1), weights, np.ones_like(tokens))


def test_training_lowers_the_loss(model: qwen3.Model):
    trainer = Trainer(model, learning_rate=1e-2, dtype=mx.float32)
    losses = [float(trainer.step(counting_batch(), 0.0, number + 200)) for number in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_tokens_without_weight_do_not_train(model: qwen3.Model):
    batch = counting_batch()
    nothing = PackedRows(batch.tokens, batch.labels, np.zeros_like(batch.weights), batch.segments)
    trainer = Trainer(model, learning_rate=1e-2, dtype=mx.float32)
    assert trainer.step(nothing, 0.0, 200).item() == 0


def test_conversations_in_one_row_do_not_see_each_other(model: qwen3.Model):
    first, second = [5, 9, 7, 30], [11, 3, 8]
    row = mx.array([first + second])
    mask = ConversationMask(mx.array([[1, 1, 1, 1, 2, 2, 2]]))
    packed = model(row, cache=[mask] * len(model.layers))
    assert mx.allclose(packed[0, :4], model(mx.array([first]))[0], atol=1e-4)
    assert mx.allclose(packed[0, 4:], model(mx.array([second]))[0], atol=1e-4)


def test_a_stored_model_comes_back_within_8_bit_rounding(model: qwen3.Model, tmp_path: Path):
    save_quantized(model, tiny_config(), tmp_path)
    loaded = load_float32(tmp_path)
    before, after = named_weights(model), named_weights(loaded)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert after[name].dtype == mx.float32
        spread = float(weight.max() - weight.min())
        assert float(mx.abs(after[name] - weight).max()) <= 0.01 * spread + 1e-6


def test_batched_decoding_equals_decoding_alone(model: qwen3.Model):
    prompts = [[5, 9, 7], [30], [11, 3, 8, 40, 41, 42]]
    together = greedy(model, prompts, [6, 4, 5], eos_id=1)
    alone = [greedy(model, [prompt], [limit], eos_id=1)[0]
             for prompt, limit in zip(prompts, [6, 4, 5], strict=True)]  # fmt: skip
    assert together == alone
    assert all(len(ids) <= limit for ids, limit in zip(together, [6, 4, 5], strict=True))


def test_decoding_stops_at_the_end_token(model: qwen3.Model):
    first = greedy(model, [[5, 9, 7]], [1], eos_id=-1)[0][0]
    assert greedy(model, [[5, 9, 7]], [6], eos_id=first) == [[]]


def test_progress_counts_steps_when_no_time_is_given():
    progress = progress_by(None, 10)
    assert [progress(0), progress(5), progress(10)] == [0.0, 0.5, 1.0]


def test_workers_supply_full_batches():
    source = batches(DEMO_FOLDER / "tokenizer.json", rows=2, workers=1, seed=3, shard_size=800)
    first, second = next(source), next(source)
    source.close()
    assert first.tokens.shape == second.tokens.shape == (2, ROW_LENGTH)
    assert (first.segments > 0).mean() > 0.8
    assert (first.tokens != second.tokens).any()


def test_a_trained_tokenizer_is_small_and_reproducible(tmp_path: Path):
    tokenizer = train_tokenizer(conversations=300)
    assert tokenizer.get_vocab_size() <= 4096
    assert tokenizer.to_str() == train_tokenizer(conversations=300).to_str()
    save_tokenizer(tokenizer, tmp_path, max_length=99)
    assert {file.name for file in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert token_id(tokenizer, IM_END) != token_id(tokenizer, END_OF_TEXT)
    with pytest.raises(ConfigError):
        token_id(tokenizer, "<|none|>")
