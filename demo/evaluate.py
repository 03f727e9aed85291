"""Accuracy of a demonstration model on held-out problems.

python -m demo.evaluate [--model PATH] [--limit N] [--thinking on|off]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from demo.chat_format import IM_END, ChatFormat, token_id
from demo.checks import is_right, is_valid_call
from demo.compose import TASKS, surrounded
from demo.decoding import greedy
from demo.example import Example, draw
from demo.network import load_float32
from demo.tasks.arithmetic import addition
from mlx_parallm.demo_models.folders import DEMO_FOLDER

BATCH = 64


@dataclass(frozen=True, slots=True)
class Failure:
    """A wrong answer."""

    prompt: str
    wanted: str
    got: str


@dataclass(frozen=True, slots=True)
class Score:
    """Right answers of a task, and some of the wrong ones."""

    right: int
    total: int
    failures: tuple[Failure, ...] = ()

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return self.right / self.total


def two_digit_addition(rng: Random) -> Example:
    """Return an addition whose numbers both have two digits."""
    while True:
        example = addition(rng)
        parts = example.key.split("+")
        if all(len(number) == 2 and number.isdecimal() for number in parts):
            return example


def held_out(task: str, count: int, seed: int) -> list[Example]:
    """Return ``count`` distinct held-out problems of a task, in varied surroundings."""
    rng = Random(f"{task}{seed}")
    generate = two_digit_addition if task == "two_digit_addition" else TASKS[task]
    examples: dict[tuple[str, str], Example] = {}
    for _ in range(100 * count):
        if len(examples) == count:
            break
        example = draw(generate, rng, "held_out")
        identity = (example.key, str(example.messages[-1]["content"]))
        examples[identity] = surrounded(example, rng, "held_out")
    return list(examples.values())


class Evaluator:
    """Runs a model over held-out problems."""

    def __init__(self, folder: Path, *, thinking: bool) -> None:
        self._model = load_float32(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._eos_id = token_id(self._tokenizer, IM_END)
        self._chat = ChatFormat()
        self._thinking = thinking

    def answers(self, examples: list[Example]) -> list[str]:
        """Return the model's greedy answer to each example."""
        prompts = [
            self._tokenizer.encode(self._chat.prompt(example, thinking=self._thinking)).ids
            for example in examples
        ]
        limits = [
            20 + 3 * len(self._tokenizer.encode(self._chat.target(example, thinking=True)).ids) // 2
            for example in examples
        ]
        order = sorted(range(len(examples)), key=lambda index: len(prompts[index]))
        texts = [""] * len(examples)
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            written = greedy(
                self._model,
                [prompts[index] for index in chosen],
                [limits[index] for index in chosen],
                self._eos_id,
            )
            for index, ids in zip(chosen, written, strict=True):
                texts[index] = self._tokenizer.decode(ids, skip_special_tokens=False)
        return texts

    def score(self, examples: list[Example]) -> Score:
        """Judges the model's answers."""
        texts = self.answers(examples)
        verdicts = [is_right(*pair) for pair in zip(examples, texts, strict=True)]
        failures = [
            Failure(self._chat.prompt(example, thinking=self._thinking), example.content, text)
            for example, text, right in zip(examples, texts, verdicts, strict=True)
            if not right
        ]
        return Score(sum(verdicts), len(verdicts), tuple(failures))

    def valid_calls(self, examples: list[Example]) -> Score:
        """Return the number of answers that are valid calls of tools and parameters on offer."""
        texts = self.answers(examples)
        verdicts = [is_valid_call(*pair) for pair in zip(examples, texts, strict=True)]
        return Score(sum(verdicts), len(verdicts))


def evaluate(folder: Path, *, limit: int, thinking: bool, seed: int) -> dict[str, Score]:
    """Return scores of every task, of two-digit addition alone, and of tool calls' validity."""
    evaluator = Evaluator(folder, thinking=thinking)
    scores: dict[str, Score] = {}
    for task in (*TASKS, "two_digit_addition"):
        scores[task] = evaluator.score(held_out(task, limit, seed))
        print(f"{task:20} {scores[task].accuracy:6.1%} of {scores[task].total}", flush=True)
    scores["valid_tool_calls"] = evaluator.valid_calls(held_out("tool_call", limit, seed))
    print(f"{'valid_tool_calls':20} {scores['valid_tool_calls'].accuracy:6.1%}", flush=True)
    return scores


def write_failures(scores: dict[str, Score], file: Path) -> None:
    """Write up to ten wrong answers a task as JSON."""
    failures = {
        task: [[f.prompt, f.wanted, f.got] for f in score.failures[:10]]
        for task, score in scores.items()
    }
    file.write_text(json.dumps(failures, indent=1, ensure_ascii=False))


def main() -> None:
    """Evaluate the model of the command line."""
    parser = argparse.ArgumentParser(description="Accuracy on held-out problems, by task.")
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER, help="folder of the model")
    parser.add_argument("--limit", type=int, default=200, help="problems per task")
    parser.add_argument("--thinking", choices=("on", "off"), default="on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=Path, help="write some wrong answers to this file")
    options = parser.parse_args()
    scores = evaluate(
        options.model, limit=options.limit, thinking=options.thinking == "on", seed=options.seed
    )
    if options.failures:
        write_failures(scores, options.failures)


if __name__ == "__main__":
    main()
