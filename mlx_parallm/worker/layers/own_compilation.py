"""Turns off compilation inside mlx_lm's layers, which would fix the weights of the first step.

On Metal the linear attention of ``kimi_k3`` compiles its decode step when it first runs. Weights
and the adapters of the rows are constants of that trace, so later ones would have no effect.
"""

from __future__ import annotations

import mlx.nn as nn


def run_uncompiled(model: nn.Module) -> int:
    """Make such layers call the function that they would compile; return how many there are."""
    layers = [
        module for module in model.modules() if callable(getattr(module, "_decode_core", None))
    ]
    for layer in layers:
        layer._step = layer._decode_core
    return len(layers)
