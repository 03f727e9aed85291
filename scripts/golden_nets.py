"""A writer of torch's results for small nets, for the tests: tests/golden/nets.

Run it by hand, in an environment of its own that has torch:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 safetensors numpy
    /tmp/golden/bin/python -m scripts.golden_nets [--only part-of-a-name]

A file has the config in its metadata, and tensors whose names begin with their part: ``weights/``,
``inputs/``, ``outputs/``; for recurrent nets also ``states/``, ``next/`` and ``episode_start``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]

from examples.policies.from_torch import RECURRENT, convert

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "nets"
ROWS, TIMES = 5, 7


@dataclass(frozen=True)
class Case:
    """A net and the sizes of its input's rows."""

    name: str
    modules: tuple[nn.Module, ...]
    sizes: tuple[int, ...] = (6,)
    dtype: torch.dtype = torch.float32
    num_choices: int = 0


def cases() -> list[Case]:
    """Return all cases; modules are made anew, from one seed."""
    torch.manual_seed(0)
    return [*_activations(), *_dense(), *_images(), *_recurrent()]


def _activations() -> list[Case]:
    functions = [
        nn.Tanh(),
        nn.ReLU(),
        nn.ReLU6(),
        nn.Sigmoid(),
        nn.GELU(),
        nn.GELU(approximate="tanh"),
        nn.SiLU(),
        nn.Mish(),
        nn.ELU(),
        nn.ELU(alpha=0.7),
        nn.SELU(),
        nn.LeakyReLU(),
        nn.LeakyReLU(0.2),
        nn.Softplus(),
        nn.Softmax(dim=-1),
        nn.LogSoftmax(dim=-1),
        nn.Hardtanh(-0.4, 0.6),
        nn.Identity(),
    ]
    return [
        Case(f"activation_{place:02}_{type(function).__name__.lower()}", (function,))
        for place, function in enumerate(functions)
    ]


def _dense() -> list[Case]:
    norm = nn.BatchNorm1d(9)
    _fill(norm)
    return [
        Case("mlp", (nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))),
        Case("mlp_bfloat16", (nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)), dtype=torch.bfloat16),
        Case("mlp_float16", (nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)), dtype=torch.float16),
        Case("no_bias", (nn.Linear(6, 3, bias=False),)),
        Case(
            "nested",
            (nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5)), nn.Sequential(nn.Linear(9, 2))),
        ),
        Case("layer_norm", (nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 2))),
        Case("layer_norm_two", (nn.LayerNorm((3, 4), eps=1e-3),), (2, 3, 4)),
        Case("layer_norm_plain", (nn.LayerNorm(6, elementwise_affine=False),)),
        Case("layer_norm_no_bias", (nn.LayerNorm(6, bias=False),)),
        Case("batch_norm", (nn.Linear(6, 9), norm, nn.ReLU(), nn.BatchNorm1d(9, bias=False))),
        Case(
            "embedding", (nn.Embedding(11, 4), nn.Flatten(), nn.Linear(12, 2)), (3,), num_choices=11
        ),
    ]


def _images() -> list[Case]:
    norm = nn.BatchNorm2d(4, affine=False)
    _fill(norm)
    return [
        Case(
            "conv2d",
            (
                nn.Conv2d(3, 8, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(8, 4, (3, 2), stride=(1, 2), padding=(0, 1)),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(4 * 4 * 4, 5),
            ),
            (3, 11, 13),
        ),
        Case("conv2d_groups", (nn.Conv2d(4, 6, 3, groups=2, dilation=2, bias=False),), (4, 9, 8)),
        Case("conv2d_same", (nn.Conv2d(2, 3, (3, 5), padding="same"),), (2, 6, 7)),
        Case(
            "pools",
            (
                nn.Conv2d(2, 4, 3),
                norm,
                nn.MaxPool2d(3, stride=2, padding=1),
                nn.AvgPool2d((2, 3), stride=1, padding=(1, 0)),
            ),
            (2, 13, 12),
        ),
    ]


def _recurrent() -> list[Case]:
    return [
        Case("lstm", (nn.LSTM(6, 10),)),
        Case("lstm_layers", (nn.Linear(6, 5), nn.LSTM(5, 8, num_layers=3), nn.Linear(8, 2))),
        Case("lstm_no_bias", (nn.LSTM(6, 4, bias=False, batch_first=True),)),
        Case("gru", (nn.GRU(6, 10),)),
        Case("gru_layers", (nn.GRU(6, 7, num_layers=2, bias=False), nn.Tanh(), nn.GRU(7, 3))),
        Case("tokens", (nn.Embedding(9, 5), nn.LSTM(5, 6), nn.Linear(6, 9)), (), num_choices=9),
        Case(
            "image_lstm",
            (nn.Conv2d(1, 2, 3), nn.Flatten(), nn.LSTM(24, 4), nn.Linear(4, 1)),
            (1, 5, 6),
        ),
    ]


def _fill(norm: nn.Module) -> None:
    """Give statistics to a normalisation that has seen no batch."""
    for name, tensor in norm.state_dict().items():
        if tensor.is_floating_point():
            norm.get_buffer(name).copy_(
                torch.rand_like(tensor) + 0.5
            ) if "running" in name else None


def main() -> None:
    """Write the files of all cases, or of those whose names contain ``--only``."""
    parser = argparse.ArgumentParser(description="Golden values of small nets.")
    parser.add_argument("--only", default="", help="a part of the names of the cases to write")
    only = parser.parse_args().only
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in cases():
        if only in case.name:
            write(case)


def write(case: Case) -> None:
    """Write the file of a case."""
    chain = nn.Sequential(*case.modules).to(case.dtype).eval()
    net = convert(chain, case.sizes)
    weights = {f"weights/{name}": tensor.clone() for name, tensor in net.weights.items()}
    with torch.no_grad():
        # Numbers are those of the stored weights; only the weights are narrow.
        results = _results(case, chain.float())
    path = FOLDER / f"{case.name}.safetensors"
    save_file(weights | results, path, metadata={"config": json.dumps(net.config)})
    print(f"{case.name}: {path.stat().st_size} bytes")


def _results(case: Case, chain: nn.Sequential) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(len(case.name))
    has_time = any(isinstance(module, RECURRENT) for module in chain)
    shape = (ROWS, TIMES, *case.sizes) if has_time else (ROWS, *case.sizes)
    if case.num_choices:
        x = torch.randint(case.num_choices, shape, generator=draw)
    else:
        x = torch.randn(shape, generator=draw) * 3
    if not has_time:
        return {"inputs/x": x, "outputs/y": chain(x).clone()}
    starts = torch.rand((ROWS, TIMES), generator=draw) < 0.25
    states = {
        f"{name}.{part}": torch.randn((ROWS, module.num_layers, module.hidden_size), generator=draw)
        for name, module in chain.named_children()
        if isinstance(module, RECURRENT)
        for part in _parts(module)
    }
    y, after = _over_time(chain, x, states, starts)
    return {
        "inputs/x": x,
        "outputs/y": y,
        "episode_start": starts,
        **{f"states/{name}": tensor for name, tensor in states.items()},
        **{f"next/{name}": tensor for name, tensor in after.items()},
    }


def _parts(module: nn.Module) -> str:
    return "hc" if isinstance(module, nn.LSTM) else "h"


def _over_time(
    chain: nn.Sequential, x: Tensor, states: Mapping[str, Tensor], starts: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return outputs and last states, by one call of torch's modules for each time."""
    now = dict(states)
    outputs: list[Tensor] = []
    for time in range(TIMES):
        begins = starts[:, time, None, None]
        now = {name: torch.where(begins, 0.0, tensor) for name, tensor in now.items()}
        y = x[:, time]
        for name, module in chain.named_children():
            if not isinstance(module, RECURRENT):
                y = module(y)
                continue
            names = [f"{name}.{part}" for part in _parts(module)]
            before = [now[each].transpose(0, 1).contiguous() for each in names]
            y, after = _step(module, y, before)
            now |= {each: tensor.transpose(0, 1) for each, tensor in zip(names, after, strict=True)}
        outputs.append(y)
    return torch.stack(outputs, 1), {name: tensor.contiguous() for name, tensor in now.items()}


def _step(module: nn.Module, y: Tensor, before: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the output and the states of one time."""
    axis = 1 if module.batch_first else 0
    if isinstance(module, nn.LSTM):
        y, after = module(y.unsqueeze(axis), tuple(before))
        return y.squeeze(axis), list(after)
    y, last = module(y.unsqueeze(axis), before[0])
    return y.squeeze(axis), [last]


if __name__ == "__main__":
    main()
