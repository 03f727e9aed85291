"""The languages of the kernels, as the CPU runs them."""

from __future__ import annotations

import pytest

from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import CudaShim, MetalShim, Shim


@pytest.fixture(params=[CudaShim, MetalShim], ids=["cuda", "metal"])
def shim(request: pytest.FixtureRequest) -> Shim:
    """Return a language's shim; without a compiler, skip the test, but fail in CI."""
    require_compiler()
    return request.param()
