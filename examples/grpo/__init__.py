"""GRPO against a running server, with rollouts over HTTP and uploads of a LoRA.

The trainer computes with the BLAS that the server has.
"""

from __future__ import annotations

from mlx_parallm.process_setup.openblas import load_openblas

load_openblas()
