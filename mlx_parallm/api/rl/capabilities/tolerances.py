"""How exact log-probabilities told while sampling are, by the dtype a model computes in."""

from __future__ import annotations

from types import MappingProxyType

from mlx_parallm.api.rl.capabilities.schema import Tolerance

# The bound is what tests hold on every execution path. The rest is what
# `python -m benchmarks.logprob_agreement` measured with the embedded model. A CPU computes every
# row of a bfloat16 product by itself, and tells the same numbers in every batch; GPUs do not.
TOLERANCES = MappingProxyType(
    {
        "float32": Tolerance(bound=1e-4, median=0.0, p99=9.6e-6, most=2.9e-5, device="cpu"),
        "bfloat16": Tolerance(
            bound=None, median=3.9e-6, p99=0.076, most=0.22, device="NVIDIA H100"
        ),
    }
)
