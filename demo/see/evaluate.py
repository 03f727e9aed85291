"""Measures the model that sees on held-out pictures.

    python -m demo.see.evaluate [--limit 1000] [--model FOLDER]

An answer is right if greedy decoding writes it exactly, to the end of the turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

from demo.see.batches import TEXT_LENGTH
from demo.see.conversations import IMAGE, ROWS_PER_PICTURE, Conversation, Rows, rows_of
from demo.see.network import SeeingModel, load_model
from demo.see.scenes import (
    TASKS,
    Question,
    Scene,
    bars,
    draw_scenes,
    number,
    pair,
    pair_questions,
    questions,
    shapes,
)
from mlx_parallm.demo_models.folders import DEMO_FOLDERS

BATCH = 50
SEED = 987_654_321
# PLACES: how the two kinds of questions about places begin.
PLACES = {"where one is": "Where", "beside another": "Is"}

Make = Callable[[np.random.Generator], tuple[Scene, ...]]


def _questions(scenes: tuple[Scene, ...], rng: np.random.Generator) -> list[list[Question]]:
    if len(scenes) == 1:
        return questions(scenes[0], rng)
    return [pair_questions((scenes[0], scenes[1]), rng)]


def _maker(task: str) -> Make:
    """Return what draws the pictures of a task."""
    if task == TASKS[3]:
        return lambda rng: (number(rng),)
    if task == TASKS[4]:
        return lambda rng: (bars(rng),)
    return pair if task == TASKS[5] else lambda rng: (shapes(rng),)


def held_out(task: str, rng: np.random.Generator, begin: str = "") -> Conversation:
    """Return one question of a task about pictures that no conversation of training has.

    Args:
        task: one of ``TASKS``.
        rng: draws pictures and question.
        begin: the question's first letters.
    """
    while True:
        scenes = draw_scenes(_maker(task), rng, "held_out")
        groups = _questions(scenes, rng)
        fitting = [
            question
            for group in groups
            for question in group
            if question.task == task and question.text.startswith(begin)
        ]
        if fitting:
            question = fitting[int(rng.integers(len(fitting)))]
            return Conversation(scenes, [(IMAGE * len(scenes) + question.text, question.answer)])


def right_answers(model: SeeingModel, rows: Rows) -> np.ndarray:
    """Return which rows are answered right, ``[rows]``.

    Greedy decoding writes the right answer just where each of its tokens is the likeliest one
    after those before it.
    """
    pixels, tokens, places, weights = (mx.array(array) for array in rows.arrays)
    logits = model(model.features(pixels), tokens[:, :-1], places[:, :-1])
    is_right = (logits.argmax(-1) == tokens[:, 1:]) | (weights == 0)
    return np.array(is_right.all(axis=1))


def measure(
    model: SeeingModel, tokenizer: Tokenizer, task: str, limit: int, begin: str = ""
) -> float:
    """Return the share of questions of a task that are answered right."""
    rng = np.random.default_rng([SEED, TASKS.index(task)])
    right = 0
    for start in range(0, limit, BATCH):
        count = min(BATCH, limit - start)
        conversations = [held_out(task, rng, begin) for _ in range(count)]
        pictures = len(conversations[0].scenes)
        length = pictures * ROWS_PER_PICTURE + TEXT_LENGTH
        rows = rows_of(tokenizer, conversations, length, SEED + start)
        right += int(right_answers(model, rows).sum())
    return right / limit


def main() -> None:
    """Print the accuracy of each task."""
    parser = argparse.ArgumentParser(description="Evaluate the model that sees.")
    parser.add_argument("--model", type=Path, default=DEMO_FOLDERS["demo:see"])
    parser.add_argument("--limit", type=int, default=1000, help="pictures of each task")
    options = parser.parse_args()
    model = load_model(options.model)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    for task in TASKS:
        print(f"{task:20} {measure(model, tokenizer, task, options.limit):.1%}", flush=True)
    for name, begin in PLACES.items():
        share = measure(model, tokenizer, TASKS[1], options.limit, begin)
        print(f"places: {name:12} {share:.1%}", flush=True)


if __name__ == "__main__":
    main()
