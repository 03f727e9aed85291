"""Adapters that PEFT made of golden models (scripts/golden_adapters.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mlx_parallm.client.tensors import encode_safetensors
from tests.decoder_folders import read_decoder
from tests.encoder_folders import read_golden
from tests.golden_weights import golden_adapter_weight

GOLDEN = Path(__file__).parent / "golden" / "adapters"


def adapter_names() -> list[str]:
    return sorted(path.stem for path in GOLDEN.glob("*.json"))


def read_golden_adapter(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def read_base(golden: dict[str, Any]) -> dict[str, Any]:
    """Return the golden model that an adapter was made of."""
    folder, name = golden["base"].split("/")
    return read_decoder(name) if folder == "decoders" else read_golden(name)


def golden_tensors(golden: dict[str, Any], *, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Return the tensors that PEFT saved; another ``scale`` gives another adapter."""
    shapes = golden["tensors"]
    return {name: scale * golden_adapter_weight(name, shapes[name]) for name in shapes}


def golden_upload(golden: dict[str, Any], *, scale: float = 1.0) -> bytes:
    """Return the content of ``adapter_model.safetensors``."""
    return encode_safetensors(golden_tensors(golden, scale=scale))


def write_golden_adapter(folder: Path, golden: dict[str, Any]) -> Path:
    """Write the folder that PEFT wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(golden["adapter_config"]))
    (folder / "adapter_model.safetensors").write_bytes(golden_upload(golden))
    return folder
