"""The elements of inputs that choose a row of a table or a place, wherever layers put them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise

from mlx_parallm.models.nets.layer import Layer, TensorForm
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.nets import Choices, TensorSpec

#: ``MAX_PIECES``: ranges of elements that layers hand on, all together.
MAX_PIECES = 1 << 18
#: ``MAX_RANGES``: ranges of an input's elements, by each of which every request is checked.
MAX_RANGES = 1024


def with_choices(
    inputs: Sequence[TensorSpec], layers: Sequence[Layer], forms: Mapping[str, TensorForm]
) -> tuple[TensorSpec, ...]:
    """Return the inputs with the choices that layers allow.

    Raises:
        ModelLoadError: there is too much to follow, or too many ranges of an input.
    """
    choices = _before_layers(layers, forms)
    specs: list[TensorSpec] = []
    for spec in inputs:
        ranges = tuple(_least(choices.get(spec.name, ())))
        if len(ranges) > MAX_RANGES:
            raise ModelLoadError(
                f"config.json: input {spec.name!r}: its whole numbers have {len(ranges)} ranges of"
                f" choices; at most {MAX_RANGES} are allowed"
            )
        specs.append(replace(spec, choices=ranges))
    return tuple(specs)


def _before_layers(
    layers: Sequence[Layer], forms: Mapping[str, TensorForm]
) -> dict[str, list[Choices]]:
    """Return ranges of inputs' elements by name, which may overlap."""
    choices: dict[str, list[Choices]] = {}
    num_pieces = 0
    for layer in reversed(layers):
        own = list(_least(choices.pop(layer.name, ())))
        inputs = [forms[name] for name in layer.inputs]
        for name, each in layer.choices_before(own, inputs):
            num_pieces += 1
            if num_pieces > MAX_PIECES:
                layer.refuse(
                    f"embedding and one_hot read whole numbers in more than {MAX_PIECES} pieces"
                )
            choices.setdefault(name, []).append(each)
    return choices


def _least(ranges: Iterable[Choices]) -> Iterator[Choices]:
    """Yield ranges in order that do not overlap, each with the least count of those there."""
    begins = sorted(ranges, key=lambda each: each.begin, reverse=True)
    bounds = sorted({bound for each in begins for bound in (each.begin, each.end)})
    open_ranges: list[tuple[int, int]] = []
    last: Choices | None = None
    for begin, end in pairwise(bounds):
        while begins and begins[-1].begin <= begin:
            each = begins.pop()
            heappush(open_ranges, (each.count, each.end))
        while open_ranges and open_ranges[0][1] <= begin:
            heappop(open_ranges)
        if not open_ranges:
            continue
        count = open_ranges[0][0]
        if last is not None and (last.end, last.count) == (begin, count):
            last = replace(last, end=end)
            continue
        if last is not None:
            yield last
        last = Choices(begin, end, count)
    if last is not None:
        yield last
