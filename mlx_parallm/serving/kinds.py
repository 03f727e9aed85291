"""The kinds of models that are served: a new kind is a package, and a line here.

Its builder is a line in ``build.py``, which processes without an engine do not import.
"""

from __future__ import annotations

from mlx_parallm.engine.kind import Kind
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.nets.kind import NETS
from mlx_parallm.pooling.kind import POOLING

#: The first kind that serves a folder's model loads it. Models that generate come last: they take
#: every folder, and share out the memory that is left.
KINDS: tuple[Kind, ...] = (NETS, POOLING, GENERATION)


def ignore_progress(_text: str, _share: float) -> None:
    """Report nothing."""
