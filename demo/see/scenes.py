"""Scenes of drawn pictures, and the questions that may be asked about them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from demo.see import drawing
from demo.see.drawing import COLOURS, HIDDEN, KINDS, SIDE, Pixels

HELD_OUT_ONE_IN = 20
CELL = SIDE // 3
PLACES = (
    ("top left", "top", "top right"),
    ("left", "center", "right"),
    ("bottom left", "bottom", "bottom right"),
)
TASKS = ("colours and shapes", "places", "counts", "digits", "bars", "two pictures")
Split = Literal["train", "held_out"]
T = TypeVar("T")


class Question(NamedTuple):
    """A question, its answer, and the task it belongs to."""

    task: str
    text: str
    answer: str


class Item(NamedTuple):
    """A shape: its colour, its kind and its cell (row, column) of a 3 x 3 grid.

    A cell of (-1, -1) is a large shape somewhere.
    """

    colour: str
    kind: str
    row: int
    column: int

    @property
    def name(self) -> str:
        """Return the colour and the kind."""
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of one picture: shapes, or a number, or bars (colours and heights)."""

    background: str
    items: tuple[Item, ...] = ()
    number: str = ""
    colour: str = "black"
    bars: tuple[tuple[str, int], ...] = ()

    @property
    def key(self) -> str:
        """Return what makes two pictures the same for the split."""
        items = sorted(tuple(item) for item in self.items)
        return f"{items} {self.number} {self.bars}"

    def draw(self, rng: np.random.Generator) -> Pixels:
        """Return the picture."""
        picture = drawing.canvas(self.background, rng)
        for item in self.items:
            _draw_item(picture, item, rng)
        if self.number:
            drawing.print_number(picture, self.number, drawing.tint(self.colour, rng), rng)
        width = SIDE // max(1, len(self.bars))
        for index, (colour, height) in enumerate(self.bars):
            thickness = int(rng.integers(max(5, width // 2), width - 2))
            bar = np.ones((7 * height, thickness), np.float32)
            drawing.put(picture, bar, drawing.tint(colour, rng), index * width + 2, 61 - 7 * height)
        return drawing.finished(picture, rng)


def _draw_item(picture: np.ndarray, item: Item, rng: np.random.Generator) -> None:
    is_large = item.row < 0
    side = int(rng.integers(22, 50) if is_large else rng.integers(12, 19))
    room = (SIDE if is_large else CELL) - side + 1
    x, y = (int(rng.integers(0, room)) for _ in range(2))
    if not is_large:
        x, y = x + item.column * CELL, y + item.row * CELL
    colour = drawing.tint(item.colour, rng)
    drawing.put(picture, drawing.shape_mask(item.kind, side), colour, x, y)


def split_of(scenes: Sequence[Scene]) -> Split:
    """Return the split of pictures, by a hash of what they show: one in twenty is held out."""
    digest = zlib.crc32("|".join(scene.key for scene in scenes).encode())
    return "held_out" if digest % HELD_OUT_ONE_IN == 0 else "train"


def _pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


def _background(rng: np.random.Generator) -> str:
    return _pick(rng, ("light", "light", "grey", "dark"))


def _colours(background: str) -> list[str]:
    return [colour for colour in COLOURS if colour not in HIDDEN[background]]


def shapes(rng: np.random.Generator, count: int | None = None) -> Scene:
    """Return a scene of one to six shapes, often alike so that counting needs care."""
    background = _background(rng)
    count = count or int(rng.integers(1, 7))
    colours = list(rng.permutation(_colours(background)))[: int(rng.integers(1, 7))]
    kinds = list(rng.permutation(KINDS))[: int(rng.integers(1, 7))]
    cells = rng.permutation(9)[:count]
    items = tuple(
        Item(str(_pick(rng, colours)), str(_pick(rng, kinds)), int(cell) // 3, int(cell) % 3)
        for cell in cells
    )
    if count == 1 and rng.random() < 0.4:
        items = (items[0]._replace(row=-1, column=-1),)
    return Scene(background, items)


def number(rng: np.random.Generator) -> Scene:
    """Return a scene with a number of one to three digits."""
    background = _background(rng)
    digits = "".join(str(digit) for digit in rng.integers(0, 10, int(rng.integers(1, 4))))
    return Scene(background, number=digits, colour=_pick(rng, _colours(background)))


def bars(rng: np.random.Generator) -> Scene:
    """Return a scene of two to five bars of different colours and heights."""
    background = _background(rng)
    count = int(rng.integers(2, 6))
    colours = rng.permutation(_colours(background))[:count]
    heights = 1 + rng.permutation(8)[:count]
    pairs = zip(colours, heights, strict=True)
    return Scene(background, bars=tuple((str(colour), int(height)) for colour, height in pairs))


def _unique(items: Sequence[Item], field: Callable[[Item], str]) -> list[Item]:
    values = [field(item) for item in items]
    return [item for item in items if values.count(field(item)) == 1]


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _name_questions(scene: Scene, rng: np.random.Generator) -> list[Question]:
    task = TASKS[0]
    made = []
    word = _pick(rng, ("colour", "color"))
    for item in _unique(scene.items, lambda item: item.kind)[:2]:
        made.append(Question(task, f"What {word} is the {item.kind}?", item.colour))
    for item in _unique(scene.items, lambda item: item.colour)[:2]:
        made.append(Question(task, f"What shape is {item.colour}?", item.kind))
        made.append(Question(task, f"What is {item.colour}?", f"the {item.kind}"))
    if len(scene.items) == 1:
        [item] = scene.items
        texts = ("What is in the picture?", "What do you see?", "What is this?", "Describe it.")
        made.append(Question(task, _pick(rng, texts), _a(item.name)))
        made.append(Question(task, f"What {word} is it?", item.colour))
        made.append(Question(task, _pick(rng, ("What shape is it?", "Which shape?")), item.kind))
    names = {item.name for item in scene.items}
    present = _pick(rng, sorted(names))
    near = _pick(rng, scene.items)
    other = _pick(
        rng, (f"{near.colour} {_pick(rng, KINDS)}", f"{_pick(rng, list(COLOURS))} {near.kind}")
    )
    for name in (present, other):
        answer = "yes" if name in names else "no"
        made.append(Question(task, f"Is there {_a(name)}?", answer))
    return made


def _place_questions(scene: Scene, rng: np.random.Generator) -> list[Question]:
    task = TASKS[1]
    if any(item.row < 0 for item in scene.items):
        return []
    unique = _unique(scene.items, lambda item: item.name)
    made = []
    for item in unique[:3]:
        place = PLACES[item.row][item.column]
        made.append(Question(task, f"Where is the {item.name}?", place))
    if len(unique) >= 2:
        first, second = (unique[int(index)] for index in rng.permutation(len(unique))[:2])
        across = {"left of": first.column < second.column, "right of": first.column > second.column}
        along = {"above": first.row < second.row, "below": first.row > second.row}
        sides = {**(across if first.column != second.column else {})}
        sides |= along if first.row != second.row else {}
        side = _pick(rng, list(sides))
        text = f"Is the {first.name} {side} the {second.name}?"
        made.append(Question(task, text, "yes" if sides[side] else "no"))
    return made


def is_beside(question: Question) -> bool:
    """True if a question is about where a shape is from another."""
    return question.task == TASKS[1] and question.text.startswith("Is ")


def _count_questions(scene: Scene, rng: np.random.Generator) -> list[Question]:
    task = TASKS[2]
    items = scene.items
    near = _pick(rng, items)
    colour = near.colour if rng.random() < 0.8 else _pick(rng, list(COLOURS))
    kind = near.kind if rng.random() < 0.8 else _pick(rng, KINDS)
    texts = ("How many shapes are there?", "How many shapes do you see?", "Count the shapes.")
    by_colour = sum(item.colour == colour for item in items)
    by_kind = sum(item.kind == kind for item in items)
    by_both = sum(item.name == f"{colour} {kind}" for item in items)
    plural = "crosses" if kind == "cross" else f"{kind}s"
    return [
        Question(task, _pick(rng, texts), str(len(items))),
        Question(task, f"How many {colour} shapes are there?", str(by_colour)),
        Question(task, f"How many {plural} are there?", str(by_kind)),
        Question(task, f"How many {colour} {plural} are there?", str(by_both)),
    ]


def _number_questions(scene: Scene, rng: np.random.Generator) -> list[Question]:
    texts = ("What number is this?", "Which number is printed?", "Read the number.",
             "What number do you see?", "What is in the picture?")  # fmt: skip
    word = _pick(rng, ("colour", "color"))
    return [
        Question(TASKS[3], _pick(rng, texts), scene.number),
        Question(TASKS[3], _pick(rng, texts), scene.number),
        Question(TASKS[3], "How many digits are there?", str(len(scene.number))),
        Question(TASKS[3], f"What {word} is the number?", scene.colour),
    ]


def _bar_questions(scene: Scene, rng: np.random.Generator) -> list[Question]:
    task = TASKS[4]
    ranked = sorted(scene.bars, key=lambda bar: bar[1])
    first, second = (ranked[int(index)] for index in rng.permutation(len(ranked))[:2])
    text = f"Is the {first[0]} bar taller than the {second[0]} bar?"
    return [
        Question(task, _pick(rng, ("Which bar is the tallest?", "Which bar is the highest?")),
                 ranked[-1][0]),
        Question(task, _pick(rng, ("Which bar is the shortest?", "Which bar is the lowest?")),
                 ranked[0][0]),
        Question(task, "How many bars are there?", str(len(ranked))),
        Question(task, text, "yes" if first[1] > second[1] else "no"),
    ]  # fmt: skip


def questions(scene: Scene, rng: np.random.Generator) -> list[list[Question]]:
    """Return the questions about one picture, by task."""
    if scene.number:
        return [_number_questions(scene, rng)]
    if scene.bars:
        return [_bar_questions(scene, rng)]
    makers = (_name_questions, _place_questions, _count_questions)
    return [made for maker in makers if (made := maker(scene, rng))]


def pair(rng: np.random.Generator) -> tuple[Scene, Scene]:
    """Return two pictures of one sort, alike in something half of the time."""
    sort = int(rng.integers(3))
    if sort == 0:
        return number(rng), number(rng)
    if sort == 1:
        return shapes(rng), shapes(rng)
    first, second = shapes(rng, 1), shapes(rng, 1)
    if rng.random() < 0.6:
        item, model = second.items[0], first.items[0]
        shared = int(rng.integers(3))
        if shared != 1 and model.colour not in HIDDEN[second.background]:
            item = item._replace(colour=model.colour)
        if shared != 0:
            item = item._replace(kind=model.kind)
        second = Scene(second.background, (item,))
    return first, second


def _order(first: int, second: int) -> str:
    if first == second:
        return "the same"
    return "the first" if first > second else "the second"


def pair_questions(scenes: tuple[Scene, Scene], rng: np.random.Generator) -> list[Question]:
    """Return questions about two pictures that are compared."""
    task = TASKS[5]
    first, second = scenes
    if first.number:
        larger, smaller = int(first.number) - int(second.number), 0
        which = int(rng.integers(2))
        return [
            Question(task, "Which number is larger?", _order(larger, smaller)),
            Question(task, "Which number is smaller?", _order(smaller, larger)),
            Question(task, f"What number is in the {('first', 'second')[which]} picture?",
                     scenes[which].number),
        ]  # fmt: skip
    counts = (len(first.items), len(second.items))
    made = [
        Question(task, "Which picture has more shapes?", _order(*counts)),
        Question(task, "Which picture has fewer shapes?", _order(*counts[::-1])),
    ]
    if counts == (1, 1):
        left, right = first.items[0], second.items[0]
        which = int(rng.integers(2))
        word = _pick(rng, ("colour", "color"))
        made = [
            Question(task, "Are the shapes the same?", _yes(left.kind == right.kind)),
            Question(task, "Do both pictures show the same shape?", _yes(left.kind == right.kind)),
            Question(task, f"Do they have the same {word}?", _yes(left.colour == right.colour)),
            Question(task, f"What is in the {('first', 'second')[which]} picture?",
                     _a(scenes[which].items[0].name)),
        ]  # fmt: skip
    return made


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def draw_scenes(
    make: Callable[[np.random.Generator], tuple[Scene, ...]],
    rng: np.random.Generator,
    split: Split,
) -> tuple[Scene, ...]:
    """Return the first scenes that belong to ``split``."""
    while True:
        scenes = make(rng)
        if split_of(scenes) == split:
            return scenes


def any_scene(rng: np.random.Generator) -> tuple[Scene, ...]:
    """Return one picture of any sort."""
    kind = rng.random()
    return (number(rng) if kind < 0.2 else bars(rng) if kind < 0.35 else shapes(rng),)
