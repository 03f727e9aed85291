"""Classes of models' own code, which is imported from where transformers keeps it."""

from __future__ import annotations

from mlx_parallm.config import EngineConfig


def find_remote_code(config: EngineConfig) -> None:
    """Let this process unpickle what another has made by a model's own code, where that is allowed.

    transformers puts its folder of such modules on the path when it first loads one.
    """
    if any(model.trust_remote_code for model in config.models):
        # Only then: it takes half a second, and makes the folder.
        from transformers.dynamic_module_utils import init_hf_modules  # noqa: PLC0415

        init_hf_modules()
