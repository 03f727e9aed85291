"""A process that is alone imports nothing that only several ranks need, and joins no group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx_parallm

# CODE prints for each environment the worker's type, or the error, and the modules imported so far.
CODE = """
import json, sys
import mlx.core as mx
from mlx_parallm.cli.ranks import with_ranks
from mlx_parallm.config import EngineConfig
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.serving.build import worker_for

def init(*arguments, **options):
    raise RuntimeError("joins a group")

def opened(environment):
    try:
        config = with_ranks(EngineConfig(), ServerConfig(), environment)
        with worker_for(config, MetricFamilies()) as worker:
            result = type(worker).__name__
    except Exception as problem:
        result = str(problem)
    return result, [name for name in sys.modules if name.startswith("mlx_parallm.distributed")]

mx.distributed.init = init
print(json.dumps([opened(environment) for environment in json.loads(sys.argv[1])]))
"""
SINGLE = {"MLX_RANK": "0", "MLX_WORLD_SIZE": "1", "NCCL_HOST_IP": "127.0.0.1"}


def test_nothing_imports_distributed_with_the_module() -> None:
    package = Path(mlx_parallm.__file__).parent
    files = [path for path in package.rglob("*.py") if path.parent.name != "distributed"]
    lines = [line for path in files for line in path.read_text().splitlines()]
    assert not [line for line in lines if line.startswith("from mlx_parallm.distributed")]
    # The functions that need it import it themselves.
    assert [line for line in lines if line.startswith("    from mlx_parallm.distributed")]


def test_only_one_of_several_ranks_imports_distributed() -> None:
    environments = [{}, SINGLE, SINGLE | {"MLX_WORLD_SIZE": "2"}]
    command = [sys.executable, "-c", CODE, json.dumps(environments)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    alone, single, (joined, modules) = json.loads(output)
    assert alone == single == ["Worker", []]
    assert "joins a group" in joined
    assert "mlx_parallm.distributed.leading" in modules
