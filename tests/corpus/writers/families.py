"""Folders that transformers saves of tiny decoders, and what it computes with them.

Each folder is a checkpoint in shards. ``computed.json`` has a prompt, its logits and greedy tokens;
``memory`` has the parameters by their names in memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors.numpy import save_file

from scripts.golden_families import config_of, results_of
from scripts.golden_family_cases import FAMILIES
from tests.golden_weights import golden_weight

# Small enough that every folder has several shards and an index.
SHARD = "20KB"


def main(target: Path) -> None:
    """Write a folder for each case."""
    transformers.logging.disable_progress_bar()
    # Models are so small that threads only wait for each other.
    torch.set_num_threads(1)
    for case in FAMILIES:
        config = config_of(case)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
        parameters = _fill(model)
        folder = target / case.name
        model.save_pretrained(folder, max_shard_size=SHARD)
        save_file(parameters, folder / "memory")
        (folder / "computed.json").write_text(json.dumps(results_of(model)), encoding="utf-8")


def _fill(model: Any) -> dict[str, np.ndarray]:
    """Give a model golden weights; return them by their names in memory.

    Tied heads are left out. Biases of experts are buffers.
    """
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    weights: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for name in model.state_dict().keys() & named.keys():
            weights[name] = np.asarray(golden_weight(name, list(named[name].shape)))
            named[name].copy_(torch.from_numpy(weights[name]))
    return weights


if __name__ == "__main__":
    main(Path(sys.argv[1]))
