"""The training data of the model that sees, and training, which learns, stores and resumes it."""

from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from demo.see import conversations, drawing
from demo.see.batches import Order, make_batch
from demo.see.conversations import (
    IMAGE,
    ROWS_PER_PICTURE,
    Conversation,
    no_picture,
    one_picture,
    rows_of,
    save_tokenizer,
    train_tokenizer,
    two_pictures,
)
from demo.see.evaluate import held_out, right_answers
from demo.see.network import config_of, load_model, named_weights, new_model, save_model
from demo.see.scenes import (
    TASKS,
    Item,
    Scene,
    bars,
    draw_scenes,
    pair_questions,
    questions,
    shapes,
    split_of,
)
from demo.see.train import Trainer, save_state


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(count=1_000)


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def answers(scene: Scene) -> dict[str, str]:
    """Return the answers to all questions that some draws have."""
    return {
        question.text: question.answer
        for seed in range(300)
        for group in questions(scene, rng(seed))
        for question in group
    }


def test_answers_follow_from_the_scene():
    items = (Item("red", "circle", 0, 0), Item("blue", "star", 2, 2), Item("red", "ring", 0, 2))
    scene = Scene("light", items)
    by_text = answers(scene)
    expected = {
        "What color is the star?": "blue",
        "What is blue?": "the star",
        "Is there a blue star?": "yes",
        "Is there a blue circle?": "no",
        "Where is the red circle?": "top left",
        "Where is the blue star?": "bottom right",
        "Is the red circle above the blue star?": "yes",
        "Is the red circle right of the blue star?": "no",
        "How many shapes are there?": "3",
        "How many red shapes are there?": "2",
        "How many rings are there?": "1",
    }
    assert {text: by_text[text] for text in expected} == expected
    # Two shapes are red, so no question asks for "the red" one.
    assert "What is red?" not in by_text


def test_answers_about_bars_numbers_and_pairs():
    by_text = answers(Scene("light", bars=(("red", 3), ("blue", 7), ("pink", 5))))
    assert by_text["Which bar is the tallest?"] == "blue"
    assert by_text["Which bar is the shortest?"] == "red"
    assert by_text["Is the pink bar taller than the red bar?"] == "yes"
    assert answers(Scene("light", number="047"))["How many digits are there?"] == "3"
    numbers = (Scene("light", number="9"), Scene("dark", number="12"))
    by_text = {question.text: question.answer for question in pair_questions(numbers, rng())}
    assert by_text["Which number is larger?"] == "the second"
    assert by_text["Which number is smaller?"] == "the first"


def test_a_picture_shows_its_shapes_where_they_are():
    picture = Scene("light", (Item("blue", "square", 2, 0),)).draw(rng())
    assert picture.shape == (drawing.SIDE, drawing.SIDE, 3)
    is_blue = picture[..., 2].astype(int) - picture[..., 0] > 100
    rows, columns = np.nonzero(is_blue)
    assert is_blue.sum() > 80
    assert rows.min() >= 42
    assert columns.max() < 21


def test_a_seed_decides_a_picture():
    scene = shapes(rng(3), 6)
    assert (scene.draw(rng(4)) == scene.draw(rng(4))).all()
    assert (scene.draw(rng(4)) != scene.draw(rng(5))).any()


def test_one_combination_in_twenty_is_held_out_and_never_trained_on():
    splits = Counter(split_of((bars(generator),)) for generator in map(rng, range(2_000)))
    assert 60 <= splits["held_out"] <= 140
    generator = rng()
    trained = [make(generator) for make in (one_picture, two_pictures) for _ in range(200)]
    assert all(
        split_of(conversation.scenes) == "train"
        for conversation in trained
        if len(conversation.scenes) == 1
    )
    [scene] = draw_scenes(lambda generator: (shapes(generator),), generator, "held_out")
    assert split_of((scene,)) == "held_out"


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_held_out_questions(task: str):
    conversation = held_out(task, rng())
    assert split_of(conversation.scenes) == "held_out"
    [(text, answer)] = conversation.turns
    assert text.count(IMAGE) == len(conversation.scenes) == (2 if task == TASKS[5] else 1)
    assert answer


def test_rows_are_what_the_chat_template_writes(tokenizer):
    conversation = two_pictures(rng(2))
    rows = rows_of(tokenizer, [conversation], 2 * ROWS_PER_PICTURE + 120, 1)
    source = (Path(conversations.__file__).parent / "chat_template.jinja").read_text()
    messages = []
    for text, answer in conversation.turns:
        pieces = text.split(IMAGE)
        parts: list[dict[str, str]] = [{"type": "text", "text": pieces[0]}]
        for piece in pieces[1:]:
            parts += [{"type": "image"}, {"type": "text", "text": piece}]
        messages += [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": answer},
        ]
    text = ImmutableSandboxedEnvironment().from_string(source).render(messages=messages)
    expected = tokenizer.encode(text.replace(IMAGE, IMAGE * ROWS_PER_PICTURE)).ids
    assert rows.tokens[0, : len(expected)].tolist() == expected
    assert not rows.tokens[0, len(expected) :].any()
    assert rows.features.max() == 2 * ROWS_PER_PICTURE - 1
    is_answer = rows.tokens[0, 1:][rows.weights[0] > 0]
    joined = "".join(answer for _, answer in conversation.turns)
    assert tokenizer.decode(is_answer.tolist()).replace(" ", "") == joined.replace(" ", "")


def test_any_text_survives_the_tokenizer(tokenizer):
    text = "Wärme 47\n\t<b>猫</b>  ?"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_batches_have_equal_shapes(tokenizer, tmp_path: Path):
    save_tokenizer(tokenizer, tmp_path)
    made = [make_batch(Order(tmp_path / "tokenizer.json", 66, seed)) for seed in (1, 3)]
    shapes_of = [[array.shape for rows in batch for array in rows.arrays] for batch in made]
    assert shapes_of[0] == shapes_of[1]
    assert (made[0][0].pixels != made[1][0].pixels).any()


@pytest.mark.slow
def test_training_learns_stores_and_resumes(tokenizer, tmp_path: Path):
    save_tokenizer(tokenizer, tmp_path)
    config = config_of(tokenizer)
    batch = make_batch(Order(tmp_path / "tokenizer.json", 3, 1))
    trainer = Trainer(new_model(config, 1), learning_rate=0.02, dtype=mx.float32)
    losses = [np.array(trainer.step(batch, 0.0, number))[0] for number in range(14)]
    assert losses[-1] < 0.7 * losses[0]
    save_state(trainer, tmp_path)
    save_model(trainer.model, config, tmp_path)
    later = Trainer(new_model(config, 2), learning_rate=0.02, dtype=mx.float32)
    later.resume(tmp_path)
    expected = trainer.step(batch, 0.0, 14)
    assert later.step(batch, 0.0, 14).tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert named_weights(load_model(tmp_path)).keys() == named_weights(trainer.model).keys()


def test_training_goes_on_from_a_model_alone(tokenizer, tmp_path: Path):
    config = config_of(tokenizer)
    model = new_model(config, 1)
    save_model(model, config, tmp_path)
    trainer = Trainer(new_model(config, 2), learning_rate=0.02, dtype=mx.float32)
    trainer.resume(tmp_path)
    for name, weight in named_weights(trainer.model).items():
        assert mx.allclose(weight, named_weights(model)[name], atol=1e-3), name


def test_training_often_asks_where_a_shape_is_from_another():
    turns = [turn for seed in range(600) for turn in one_picture(rng(seed)).turns]
    words = ("left of", "right of", "above", "below")
    share = sum(any(word in text for word in words) for text, _ in turns) / len(turns)
    assert 0.1 < share < 0.2


def test_an_answer_counts_only_if_all_of_it_is_right(tokenizer):
    model = new_model(config_of(tokenizer), 1)
    rows = rows_of(tokenizer, [no_picture(rng()), Conversation((), [("Hi", "x")])], 80, 1)
    assert not right_answers(model, rows).any()
    rows.weights[1] = 0
    assert right_answers(model, rows).tolist() == [False, True]
