"""Small nets are computed by the CPU even if there is a GPU."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_parallm.models.nets.plan import MODEL_TYPE, NetPlan, parse_net
from mlx_parallm.worker.nets.runner import device_for
from tests.builders.nets import Config, layer, linear, lstm_policy, mlp_policy, tensor


def images(size: int) -> Config:
    """Return the config of a convolution of images, and of a layer behind it."""
    places = size - 2
    return {
        "inputs": [tensor("obs", 3, size, size)],
        "outputs": [tensor("out", 2)],
        "layers": [
            layer("conv", "conv2d", "obs", in_channels=3, out_channels=8, kernel_size=3),
            layer("flat", "flatten", "conv"),
            linear("out", "flat", 8 * places * places, 2),
        ],
    }


def plan_of(config: Config) -> NetPlan:
    return parse_net({"model_type": MODEL_TYPE, **config})


@pytest.mark.parametrize(
    ("config", "num_products"),
    [
        (mlp_policy(4, 2, 64), 2 * (4 * 64 + 64 * 64) + 64 * 2 + 64),
        (lstm_policy(3, 2, 8), 4 * 8 * (3 + 8) + 8 * 2),
        (images(12), 8 * 3 * 9 * 100 + 800 * 2),
    ],
    ids=["mlp", "lstm", "images"],
)
def test_products_are_counted(config: Config, num_products: int) -> None:
    assert plan_of(config).num_products == num_products


@pytest.mark.parametrize(
    ("config", "is_small"),
    [(mlp_policy(), True), (lstm_policy(), True), (images(12), True), (images(84), False)],
    ids=["mlp", "lstm", "small images", "images"],
)
def test_large_nets_alone_take_the_gpu(config: Config, is_small: bool) -> None:
    gpu, cpu = mx.Device(mx.gpu), mx.Device(mx.cpu)
    assert device_for(plan_of(config), gpu) == (cpu if is_small else gpu)
    assert device_for(plan_of(config), cpu) == cpu
