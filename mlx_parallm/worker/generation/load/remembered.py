"""Remembers on disk what loads chose by trying, so that later loads of an equal model take it over.

A load checks paths and kernels against the stock model, which takes most of its time after the
weights are read. What it chose holds for the same weights on the same device, computed by the same
code with the same settings; the key of a file is a digest of all these.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlx_parallm
from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.models.checkpoints.contents import SeenFolder
from mlx_parallm.storage.cache_folder import CacheFolder, CacheForm
from mlx_parallm.types.content import canonical, digest_of, package_versions
from mlx_parallm.types.json_values import is_object
from mlx_parallm.worker.device.properties import arithmetic
from mlx_parallm.worker.generation.load.plan import (
    DecoderChoices,
    EarlierChoices,
    GenerationSpec,
)
from mlx_parallm.worker.generation.load.proposal_check import ProposalChoice
from mlx_parallm.worker.weights.loader import CastRule

PLANS = CacheForm(
    kind="plan", version=1, owner="choices of loads (--kernel-cache-dir)", max_files=256
)
# CODE, SUFFIXES: the folders of this package that choose or compute what was chosen, and the ends
# of their files.
CODE = ("kernels", "models", "numerics", "worker")
SUFFIXES = (".py", ".cu")
# NO_CHOICE: the settings that no choice of a load depends on, by their class. A setting that is not
# here is part of the key.
NO_CHOICE: Mapping[type, frozenset[str]] = {
    # The content of the weights is in the key.
    ModelConfig: frozenset(
        {
            "path",
            "served_names",
            "revision",
            "chat_template",
            "chat_template_kwargs",
            "tool_call_parser",
            "reasoning_parser",
            "enable_auto_tool_choice",
        }
    ),
    EngineConfig: frozenset(
        {
            "models",
            "memory",
            "kv_peers",
            "adapters",
            "encoders",
            "loading",
            "seed",
            "restart_on_failure",
            "warm_up",
            "kernel_cache_dir",
        }
    ),
    CacheConfig: frozenset(
        {
            "memory_fraction",
            "kv_cache_bytes",
            "enable_prefix_caching",
            "kv_disk",
            "kv_disk_bytes",
            "kv_host_bytes",
            "state_cache_bytes",
            "state_snapshot_tokens",
            "num_engines",
        }
    ),
    SchedulerConfig: frozenset(
        {"max_num_batched_tokens", "max_num_seqs_per_client", "max_loras", "max_waiting"}
    ),
}


class RememberedPlans:
    """The choices of loads in a folder, which several processes may use at once."""

    def __init__(self, folder: Path | None) -> None:
        """Use ``folder``; None remembers nothing."""
        self._files = CacheFolder(folder, PLANS)

    def find(self, spec: GenerationSpec, content: str) -> DecoderChoices | None:
        """Return what a load of equal weights chose; None if there was none.

        Args:
            spec: what is to be loaded.
            content: the digest of its weights and of what decides how they are read.
        """
        file = self._files.get(_key(spec, content))
        if file is None:
            return None
        try:
            values = json.loads(file)
            choices = _choices_of(values["choices"])
            return choices if _is_cast_alike(spec, choices, values["weight_bytes"]) else None
        except (KeyError, RecursionError, TypeError, ValueError):
            return None

    def put(
        self, spec: GenerationSpec, content: str, choices: DecoderChoices, weight_bytes: int
    ) -> None:
        """Remember what a load chose for weights that take ``weight_bytes`` in memory."""
        values = {"choices": asdict(choices), "weight_bytes": weight_bytes}
        self._files.put(_key(spec, content), json.dumps(values).encode())


class LoadMemory:
    """The memory of one load.

    Attributes:
        earlier: what an earlier load of an equal model chose; None if this one must choose.
    """

    def __init__(self, plans: RememberedPlans, spec: GenerationSpec, seen: SeenFolder) -> None:
        """Look for what an earlier load chose.

        Args:
            plans: where it is remembered.
            spec: what is to be loaded.
            seen: its folder; nothing is known of one that was not hashed before.
        """
        self._plans = plans
        self._spec = spec
        choices = None if seen.digest is None else plans.find(spec, seen.digest)
        self.earlier = None if choices is None else EarlierChoices(choices=choices)

    def note(self, seen: SeenFolder, choices: DecoderChoices, weight_bytes: int) -> None:
        """Remember what the load chose, once the content of the folder that it read is known."""
        if self.earlier is not None:
            return

        def put(content: str) -> None:
            self._plans.put(self._spec, content, choices, weight_bytes)

        seen.on_known = put
        # A thread that finds it now sees ``on_known``; both may write, and they write the same.
        if seen.digest is not None:
            put(seen.digest)


def _key(spec: GenerationSpec, content: str) -> str:
    """Return a digest of all that choices depend on."""
    settings = spec.settings
    parts = (
        content,
        _choosing(spec.config),
        {**_choosing(settings), "cache": None, "scheduler": None},
        _choosing(settings.cache),
        _choosing(settings.scheduler),
        package_versions(),
        _own_code(),
        _device(),
    )
    return digest_of("plan", *map(canonical, parts))


def _choosing(settings: Any) -> dict[str, Any]:
    """Return the fields that a choice may depend on, as plain values."""
    ignored = NO_CHOICE[type(settings)]
    names = [field.name for field in fields(settings) if field.name not in ignored]
    return {name: _plain(getattr(settings, name)) for name in names}


def _plain(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


@cache
def _own_code() -> str:
    """Return a digest of the code that chooses and computes."""
    root = Path(mlx_parallm.__file__).parent
    files = [path for folder in CODE for path in (root / folder).rglob("*")]
    sources = sorted(path for path in files if path.suffix in SUFFIXES)
    names = "\n".join(str(path.relative_to(root)) for path in sources)
    return digest_of("code", names, *(path.read_bytes() for path in sources))


def _device() -> dict[str, Any]:
    """Return what identifies the device, its libraries and how these are set up."""
    info = mx.device_info()
    return {
        "arithmetic": arithmetic(),
        "device": [info.get("device_name"), info.get("architecture")],
        "system": platform.platform(),
        "variables": {
            name: value
            for name, value in os.environ.items()
            if name.startswith("MLX_") and not name.startswith("MLX_PARALLM_")
        },
    }


def _is_cast_alike(spec: GenerationSpec, choices: DecoderChoices, weight_bytes: int) -> bool:
    """True if this load would cast the weights as the remembered one; free memory decides that."""
    if spec.config.dtype != "auto":
        return True
    return CastRule(free_bytes=spec.free_bytes).applies(weight_bytes) == choices.is_cast


def _choices_of(values: Any) -> DecoderChoices:
    """Return choices from their JSON; raise TypeError or ValueError for another form."""
    proposals = values["proposals"]
    choices = DecoderChoices(
        **{**values, "proposals": None if proposals is None else ProposalChoice(**proposals)}
    )
    kernels = choices.kernels
    optional = (choices.samples_by_kernel, choices.adapts_by_kernel)
    texts = (choices.path, choices.why_no_images)
    flags = () if choices.proposals is None else asdict(choices.proposals).values()
    if not (
        isinstance(choices.attention, str)
        and is_object(kernels)
        and all(isinstance(flag, bool) for flag in (choices.is_cast, *kernels.values(), *flags))
        and all(flag is None or isinstance(flag, bool) for flag in optional)
        and (choices.head is None or type(choices.head) is int)
        and all(text is None or isinstance(text, str) for text in texts)
    ):
        raise ValueError("choices of another form")
    return choices
