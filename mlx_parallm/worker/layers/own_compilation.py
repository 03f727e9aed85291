"""Layers of mlx_lm that compile a step of theirs, and would keep the weights that they saw first.

On Metal the linear attention of ``kimi_k3`` compiles its decode step at the first one. Weights, and
the adapters of the rows, are constants of what is traced: those that come later are not heeded.
"""

from __future__ import annotations

import mlx.nn as nn


def run_uncompiled(model: nn.Module) -> int:
    """Have such layers call what they would compile; how many there are."""
    layers = [one for one in model.modules() if callable(getattr(one, "_decode_core", None))]
    for layer in layers:
        layer._step = layer._decode_core
    return len(layers)
