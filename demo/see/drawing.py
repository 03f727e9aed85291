"""Drawn pictures of 64 x 64 pixels: shapes on a grid, printed numbers and bars."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

SIDE = 64
_FINE = 4  # Masks are drawn this many times larger, then made smaller.

COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (45, 80, 220),
    "yellow": (245, 220, 50),
    "orange": (245, 140, 30),
    "purple": (135, 50, 165),
    "pink": (250, 150, 195),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
KINDS = ("circle", "square", "triangle", "star", "cross", "ring")
BACKGROUNDS = {"light": (255, 255, 255), "grey": (205, 210, 215), "dark": (40, 44, 52)}
# HIDDEN: the colours that cannot be distinguished from a background.
HIDDEN = {"light": ("white",), "grey": ("white",), "dark": ("black",)}

Mask = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]


def _star(side: int) -> list[tuple[float, float]]:
    radii = (side / 2, side / 4.6)
    return [
        (
            side / 2 + radii[corner % 2] * math.sin(math.pi * corner / 5),
            side / 2 - radii[corner % 2] * math.cos(math.pi * corner / 5),
        )
        for corner in range(10)
    ]


def _draw_kind(pen: ImageDraw.ImageDraw, kind: str, side: int) -> None:
    end = side - 1
    if kind == "circle":
        pen.ellipse((0, 0, end, end), fill=255)
    elif kind == "ring":
        pen.ellipse((0, 0, end, end), fill=255)
        edge = 0.27 * side
        pen.ellipse((edge, edge, end - edge, end - edge), fill=0)
    elif kind == "square":
        edge = 0.06 * side
        pen.rectangle((edge, edge, end - edge, end - edge), fill=255)
    elif kind == "triangle":
        pen.polygon([(side / 2, 0), (0, end), (end, end)], fill=255)
    elif kind == "star":
        pen.polygon(_star(side), fill=255)
    else:
        low, high = 0.33 * side, 0.67 * side
        pen.rectangle((low, 0, high, end), fill=255)
        pen.rectangle((0, low, end, high), fill=255)


def _shrunk(fine: Image.Image) -> Mask:
    size = (max(1, fine.width // _FINE), max(1, fine.height // _FINE))
    covered = np.asarray(fine.resize(size, Image.Resampling.BOX), np.float32)
    return (covered / 255).astype(np.float32)


@functools.cache
def shape_mask(kind: str, side: int) -> Mask:
    """Return how much of each pixel a shape covers, ``[side, side]``."""
    fine = Image.new("L", (side * _FINE, side * _FINE))
    _draw_kind(ImageDraw.Draw(fine), kind, side * _FINE)
    return _shrunk(fine)


@functools.cache
def digit_mask(digit: str, height: int, stroke: int) -> Mask:
    """Return how much of each pixel a printed digit covers, without an edge around it."""
    font = ImageFont.load_default(1.4 * height * _FINE)
    fine = Image.new("L", (2 * height * _FINE, 2 * height * _FINE))
    place = (height * _FINE // 2, 0)
    ImageDraw.Draw(fine).text(place, digit, fill=255, font=font, stroke_width=stroke)
    return _shrunk(fine.crop(fine.getbbox()))


def canvas(background: str, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return an empty picture, ``[SIDE, SIDE, 3]``."""
    colour = np.array(BACKGROUNDS[background], np.float32) + rng.integers(-12, 13)
    return np.broadcast_to(colour, (SIDE, SIDE, 3)).copy()


def tint(colour: str, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return a colour's red, green and blue, a little changed."""
    return np.array(COLOURS[colour], np.float32) + rng.integers(-14, 15, 3)


def put(
    picture: npt.NDArray[np.float32], mask: Mask, colour: npt.NDArray[np.float32], x: int, y: int
) -> None:
    """Paint a mask in a colour, its left upper corner at ``x``, ``y``; beyond the edge is cut."""
    area = picture[y : y + mask.shape[0], x : x + mask.shape[1]]
    share = mask[: area.shape[0], : area.shape[1], None]
    area += share * (colour - area)


def finished(picture: npt.NDArray[np.float32], rng: np.random.Generator) -> Pixels:
    """Return a picture as bytes, half of the pictures with a little noise."""
    if rng.random() < 0.5:
        picture = picture + rng.normal(0, rng.uniform(0, 6), picture.shape).astype(np.float32)
    return np.clip(picture, 0, 255).astype(np.uint8)


def print_number(
    picture: npt.NDArray[np.float32],
    digits: Sequence[str],
    colour: npt.NDArray[np.float32],
    rng: np.random.Generator,
) -> None:
    """Print digits side by side somewhere in the picture."""
    height = int(rng.integers(14, {1: 40, 2: 32, 3: 23}[len(digits)]))
    stroke = int(rng.integers(0, 1 + height // 8))
    masks = [digit_mask(digit, height, stroke) for digit in digits]
    gap = 2
    width = sum(mask.shape[1] + gap for mask in masks) - gap
    tallest = max(mask.shape[0] for mask in masks)
    x = int(rng.integers(0, max(1, SIDE - width)))
    y = int(rng.integers(0, max(1, SIDE - tallest)))
    for mask in masks:
        put(picture, mask, colour, x, y)
        x += mask.shape[1] + gap
