"""Products of one row that follow each other in one launch.

A launch takes some 2 us to begin on the device, and its first weights another microsecond to come.
In a chain, the threadgroups of a product load weights while those of the one before still multiply,
and then wait until its output is there. They count arrivals in an array that a launch before has
made for this one, so that nothing is left of a launch that failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_parallm.kernels.build import Constant, Part
from mlx_parallm.kernels.kernel import Residency
from mlx_parallm.worker.layers.product_variants import Around, Format, Vectors

# SPACING: counts are so many numbers apart, each in a line of the cache of its own. An array of two
# counts alone would be in host memory: there MLX has its arrays of up to 8 bytes, and a wait that
# polls over the bus took a millisecond.
SPACING = 32


@dataclass(frozen=True, slots=True)
class Link:
    """A product of a chain.

    Attributes:
        variant: of its kernel.
        around: what is computed around it.
        width: rows of the weight.
    """

    variant: Vectors
    around: Around
    width: int

    @property
    def threadgroups(self) -> int:
        """Return how many threadgroups multiply."""
        return self.variant.threadgroups(1, self.width)

    @property
    def outputs(self) -> int:
        """Return how many numbers it computes."""
        return self.width // 2 if self.around.gates else self.width


@dataclass(frozen=True, slots=True)
class Chain:
    """Products of packed weights of one form, each of which reads the output of the one before.

    One that adds a residual adds the hidden states: the output of the last one before it that did,
    or what the chain is given.
    """

    form: Format
    links: tuple[Link, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the kernel's inputs."""
        names = ["rows", "hidden"]
        for number, link in enumerate(self.links):
            norm = [] if link.around.epsilon is None else ["norm_weight"]
            names += (f"{name}_{number}" for name in (*self.form.packing.names, *norm))
        return (*names, "arrivals_pool")

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the kernel's outputs."""
        return tuple(f"out_{number}" for number in range(len(self.links)))

    @property
    def counts(self) -> int:
        """Return how many numbers the counts of arrivals take: of all products but the last."""
        return (len(self.links) - 1) * SPACING

    @property
    def threads(self) -> int:
        """Return the threads of a threadgroup."""
        (threads,) = {link.variant.threads for link in self.links}
        return threads

    @property
    def threadgroups(self) -> int:
        """Return how many threadgroups there are."""
        return sum(link.threadgroups for link in self.links)

    @property
    def residency(self) -> Residency:
        """Return the room that threadgroups take."""
        each = [link.variant.residency(self.form) for link in self.links]
        return Residency(
            max(room.shared_bytes for room in each),
            self.threads,
            max(room.threadgroups for room in each),
        )

    def parts(self) -> list[Part]:
        """Return the parts of the kernel's text."""
        parts: list[Part] = []
        first, x, hidden, awaited = 0, "rows", "hidden", 0
        for number, link in enumerate(self.links):
            lines = _aliases(number, link.around, self.form, x, hidden)
            end = first + link.threadgroups
            own: Mapping[str, Constant] = {
                **link.variant.constants(self.form),
                **link.around.constants,
                "LINK": number + 1,
                "LAST": int(number + 1 == len(self.links)),
                "FIRST": first,
                "AWAITED": awaited,
                "SPACING": SPACING,
            }
            condition = f"if (blockIdx.x >= {first} && blockIdx.x < {end})"
            parts.append(Part(condition, lines, own))
            first, awaited, x = end, link.threadgroups, f"out_{number}"
            if link.around.adds:
                hidden = x
        return parts


def _aliases(number: int, around: Around, form: Format, x: str, hidden: str) -> str:
    """Return lines that name a product's arguments as the text does."""
    named = {"x": x, "out": f"out_{number}"}
    named |= {name: f"{name}_{number}" for name in form.packing.names}
    named |= {"norm_weight": f"norm_weight_{number}"} if around.epsilon is not None else {}
    named |= {"residual": hidden} if around.adds else {}
    lines = [f"auto* const {name} = {argument};" for name, argument in named.items()]
    # The text wants them to be unknown to the compiler.
    lines.append("const int x_shape[] = {rows_shape[0]};")
    lines.append(f"const int weight_shape[] = {{weight_{number}_shape[0]}};")
    return "\n".join(lines) + "\n"
