"""Exact translations of held-out numbers, dates and amounts, by kind and direction."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random

import mlx.core as mx
from tokenizers import Tokenizer

from demo.translate.batches import padded
from demo.translate.items import DIGITS, DIRECTIONS, KINDS, Direction, Value, draw, texts
from demo.translate.network import TrainedT5, load_model
from demo.translate.vocabulary import EOS_ID, PAD_ID
from mlx_parallm.demo_models.folders import DEMO_FOLDERS

BATCH = 256
MAX_TOKENS = 24


def greedy(model: TrainedT5, sources: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the likeliest next ids again and again, to ``</s>`` or ``MAX_TOKENS``."""
    ids = mx.array(padded(sources))
    written = mx.full((len(sources), 1), PAD_ID, dtype=mx.int32)
    ended = mx.zeros((len(sources),), dtype=mx.bool_)
    while not mx.all(ended).item() and written.shape[1] <= MAX_TOKENS:
        chosen = model(ids, written)[:, -1].argmax(-1).astype(mx.int32)
        written = mx.concatenate([written, chosen[:, None]], axis=1)
        ended = ended | (chosen == EOS_ID)
    rows: list[list[int]] = written[:, 1:].tolist()  # type: ignore[assignment]
    return [row[: row.index(EOS_ID) if EOS_ID in row else None] for row in rows]


def translate(model: TrainedT5, tokenizer: Tokenizer, sources: Sequence[str]) -> list[str]:
    """Return the translations of texts with their prefixes."""
    encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(sources))]
    targets: list[list[int]] = []
    for start in range(0, len(encoded), BATCH):
        targets += greedy(model, encoded[start : start + BATCH])
    return [tokenizer.decode(ids) for ids in targets]


def held_out(kind: str, count: int, seed: int) -> list[Value]:
    """Return different held-out values of a kind."""
    rng = Random(f"{kind}{seed}")
    values: dict[Value, None] = {}
    while len(values) < count:
        values[draw(rng, kind, "held_out")] = None
    return list(values)


def wrong(
    model: TrainedT5, tokenizer: Tokenizer, direction: Direction, values: Sequence[Value]
) -> list[tuple[str, str]]:
    """Return the wrong translations, each beside the right one."""
    written = [texts(value) for value in values]
    sources = [direction.prefix + text[direction.source] for text in written]
    made = translate(model, tokenizer, sources)
    pairs = zip(made, (text[direction.target] for text in written), strict=True)
    return [(text, right) for text, right in pairs if text != right]


def group_of(direction: Direction) -> str:
    """Return the group of a direction in the last lines of the report."""
    return "to words" if direction.source == DIGITS else "back to digits"


def report(model: TrainedT5, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    """Print the exact share of each kind and direction, and of groups of directions."""
    shares: dict[str, list[float]] = {}
    for kind in KINDS:
        values = held_out(kind, options.limit, options.seed)
        for direction in DIRECTIONS:
            failures = wrong(model, tokenizer, direction, values)
            share = 1 - len(failures) / len(values)
            print(
                f"{kind:8} {direction.source:>6} to {direction.target:6} {share:7.2%}", flush=True
            )
            for text, right in failures[: options.show]:
                print(f"    {text!r} instead of {right!r}")
            for group in (kind, group_of(direction), "all"):
                shares.setdefault(group, []).append(share)
    for group, values_of_group in shares.items():
        print(f"{group:26} {sum(values_of_group) / len(values_of_group):7.2%}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--folder", type=Path, default=DEMO_FOLDERS["demo:translate"])
    parser.add_argument("--limit", type=int, default=1000, help="values of each kind")
    parser.add_argument("--show", type=int, default=0, help="wrong translations to print of each")
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace) -> None:
    """Evaluate a stored model."""
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    report(load_model(options.folder), tokenizer, options)
