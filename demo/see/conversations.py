"""Conversations about drawn pictures, as text and as tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.see.drawing import SIDE, Pixels
from demo.see.scenes import (
    Question,
    Scene,
    any_scene,
    draw_scenes,
    is_beside,
    pair,
    pair_questions,
    questions,
)

IMAGE, IM_START, IM_END, END_OF_TEXT = "<image>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, IMAGE)
VOCAB_SIZE = 448
PATCH = 8
ROWS_PER_PICTURE = (SIDE // PATCH) ** 2
CONTEXT_LENGTH = 2048
MAX_TURNS = 4
# GREETINGS: texts without a picture, so that an empty conversation gets an honest answer.
GREETINGS = ("Hello", "Hi", "hello!", "Who are you?", "What can you do?", "Help", "How are you?",
             "What is this?", "What do you see?")  # fmt: skip
HELLO = "Show me a drawn picture and ask about its shapes, colours, numbers or bars."
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s+"

Turns = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Pictures, and turns of a user's text (with ``<image>`` for each picture) and an answer."""

    scenes: tuple[Scene, ...]
    turns: Turns


def _worded(text: str, rng: np.random.Generator) -> str:
    """Return a question as some people type it."""
    way = rng.random()
    if way < 0.2:
        text = text.lower()
    if rng.random() < 0.2:
        text = text.rstrip("?.")
    return text


def _with_pictures(count: int, text: str, rng: np.random.Generator) -> str:
    pictures = IMAGE * count
    space = "\n" if rng.random() < 0.3 else ""
    return pictures + space + text if rng.random() < 0.75 else text + space + pictures


def _some(groups: Sequence[list[Question]], rng: np.random.Generator) -> list[Question]:
    """Return up to ``MAX_TURNS`` different questions, of tasks chosen evenly."""
    by_text: dict[str, Question] = {}
    for _ in range(int(rng.integers(1, MAX_TURNS + 1))):
        group = groups[int(rng.integers(len(groups)))]
        question = group[int(rng.integers(len(group)))]
        by_text.setdefault(question.text, question)
    return list(by_text.values())


def _turns(groups: Sequence[list[Question]], pictures: int, rng: np.random.Generator) -> Turns:
    turns = [(_worded(question.text, rng), question.answer) for question in _some(groups, rng)]
    text, answer = turns[0]
    return [(_with_pictures(pictures, text, rng), answer), *turns[1:]]


def _practised(groups: Sequence[list[Question]]) -> list[list[Question]]:
    """Return groups of which training takes equal shares.

    Questions about two shapes take the most steps to learn, so they have a group of their own.
    """
    parts = [[question for question in group if is_beside(question)] for group in groups]
    rests = [[question for question in group if not is_beside(question)] for group in groups]
    return [group for group in (*rests, *parts) if group]


def one_picture(rng: np.random.Generator) -> Conversation:
    """Return a conversation of training about one picture."""
    [scene] = draw_scenes(any_scene, rng, "train")
    return Conversation((scene,), _turns(_practised(questions(scene, rng)), 1, rng))


def two_pictures(rng: np.random.Generator) -> Conversation:
    """Return one about two pictures: compared, or one after the other."""
    if rng.random() < 0.8:
        first, second = draw_scenes(pair, rng, "train")
        groups = [pair_questions((first, second), rng)]
        return Conversation((first, second), _turns(groups, 2, rng))
    parts = [one_picture(rng) for _ in range(2)]
    return Conversation(
        parts[0].scenes + parts[1].scenes, [turn for part in parts for turn in part.turns[:2]]
    )


def no_picture(rng: np.random.Generator) -> Conversation:
    """Return a conversation without a picture."""
    return Conversation((), [(_worded(GREETINGS[int(rng.integers(len(GREETINGS)))], rng), HELLO)])


def _user(text: str) -> str:
    return f"{IM_START}user\n{text}{IM_END}\n{IM_START}assistant\n"


def train_tokenizer(count: int = 20_000, seed: int = 7) -> Tokenizer:
    """Return a byte-level BPE tokenizer of the conversations' words, lossless for any text."""
    rng = np.random.default_rng(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made = (
        text.replace(IMAGE, "")
        for index in range(count)
        for turn in (no_picture(rng) if index % 50 == 0 else one_picture(rng)
                     if index % 3 else two_pictures(rng)).turns
        for text in ("user\n", "assistant\n", *turn)
    )  # fmt: skip
    tokenizer.train_from_iterator(made, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    template = (Path(__file__).resolve().parent / "chat_template.jinja").read_text()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class Rows:
    """Conversations as rows of equal length, with their pictures.

    Attributes:
        pixels: uint8 ``[pictures, SIDE, SIDE, 3]``.
        tokens: int32 ``[rows, length]``.
        features: int32 ``[rows, length]``; which row of all features stands there, -1 for none.
        weights: float32 ``[rows, length - 1]``; 1 where the next token is one of an answer.
    """

    pixels: Pixels
    tokens: npt.NDArray[np.int32]
    features: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the fields in order."""
        return self.pixels, self.tokens, self.features, self.weights


def _expanded(tokenizer: Tokenizer, turns: Turns, length: int) -> tuple[list[int], list[bool]]:
    """Return token ids with a run for each picture, and which of them are answers."""
    image = tokenizer.token_to_id(IMAGE)
    ids: list[int] = []
    is_answer: list[bool] = []
    for text, answer in turns:
        prompt = []
        for token in tokenizer.encode(_user(text)).ids:
            prompt += [token] * (ROWS_PER_PICTURE if token == image else 1)
        target = tokenizer.encode(answer + IM_END).ids
        after = tokenizer.encode("\n").ids
        size = len(prompt) + len(target) + len(after)
        if len(ids) + size > length:
            break
        ids += prompt + target + after
        is_answer += [False] * len(prompt) + [True] * len(target) + [False] * len(after)
    return ids, is_answer


def rows_of(
    tokenizer: Tokenizer, conversations: Sequence[Conversation], length: int, seed: int
) -> Rows:
    """Return conversations as rows; turns beyond ``length`` are left out."""
    rng = np.random.default_rng(seed)
    image = tokenizer.token_to_id(IMAGE)
    tokens = np.zeros((len(conversations), length), np.int32)
    weights = np.zeros((len(conversations), length - 1), np.float32)
    pixels: list[Pixels] = []
    features = np.full((len(conversations), length), -1, np.int32)
    for row, conversation in enumerate(conversations):
        ids, is_answer = _expanded(tokenizer, conversation.turns, length)
        tokens[row, : len(ids)] = ids
        weights[row, : len(ids) - 1] = is_answer[1:]
        places = np.flatnonzero(tokens[row] == image)
        features[row, places] = len(pixels) * ROWS_PER_PICTURE + np.arange(len(places))
        pixels += [scene.draw(rng) for scene in conversation.scenes]
    stacked = np.stack(pixels) if pixels else np.zeros((1, SIDE, SIDE, 3), np.uint8)
    return Rows(stacked, tokens, features, weights)
