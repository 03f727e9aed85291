"""Weights of nets: what is refused at load, of another folder and of an upload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.adapters.arrays import to_host
from mlx_parallm.models.nets.plan import read_net
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadError
from mlx_parallm.worker.nets import weights as module
from mlx_parallm.worker.nets.weights import FILE, PARAM, NetWeights
from tests.builders.nets import mlp_policy, random_weights, write_net
from tests.refusal_sites import Site, passed_sites, refusal_sites

Arrays = dict[str, mx.array]
NAME = "pi.0.bias"


def without(arrays: Arrays) -> Arrays:
    return {name: array for name, array in arrays.items() if name != NAME}


#: ``FAULTS``: changes of weights that are refused, by what the refusal says.
FAULTS: dict[str, Callable[[Arrays], Arrays]] = {
    f"The weight '{NAME}' is missing.": without,
    "'extra' is no weight of this net.": lambda arrays: arrays | {"extra": mx.zeros(1)},
    f"'{NAME}' has shape [9]; it must be [64].": lambda arrays: arrays | {NAME: mx.zeros(9)},
    f"'{NAME}' is int32; it must be float32": lambda arrays: (
        arrays | {NAME: mx.zeros(64, mx.int32)}
    ),
    f"'{NAME}' has NaN or infinite numbers.": lambda arrays: arrays | {NAME: mx.full(64, mx.nan)},
}
#: ``FILES``: contents of a file that is none.
FILES = [b"", b"\x08", b"\xff" * 64, b"\x02" + bytes(7) + b"{]"]


@pytest.fixture
def weights(tmp_path: Path) -> NetWeights:
    folder = write_net(tmp_path / "right")
    return NetWeights(folder, read_net(folder))


def arrays_of(text: str) -> Arrays:
    return FAULTS[text](random_weights({"model_type": "mlx_parallm_net", **mlp_policy()}))


def write_wrong(folder: Path, text: str) -> Path:
    write_net(folder)
    mx.save_safetensors(str(folder / FILE), arrays_of(text))
    return folder


def refusal_at_load(folder: Path) -> BaseException:
    with pytest.raises(ModelLoadError) as caught:
        NetWeights(folder, read_net(folder))
    return caught.value


def refusal_of_folder(weights: NetWeights, folder: Path) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        weights.prepare_folder(folder)
    assert caught.value.param == PARAM
    return str(caught.value)


@pytest.mark.parametrize("text", FAULTS)
def test_folders_that_do_not_fit_are_refused_by_name(
    weights: NetWeights, text: str, tmp_path: Path
) -> None:
    folder = write_wrong(tmp_path / "wrong", text)
    refusal = str(refusal_at_load(folder))
    assert refusal.startswith(f"{folder}: {FILE}: {text}")
    assert refusal_of_folder(weights, folder) == refusal


@pytest.mark.parametrize("content", [None, *FILES])
def test_files_that_cannot_be_read_are_refused_by_name(
    weights: NetWeights, content: bytes | None, tmp_path: Path
) -> None:
    folder = write_net(tmp_path / "wrong")
    file = folder / FILE
    file.unlink() if content is None else file.write_bytes(content)
    refusal = str(refusal_at_load(folder))
    assert refusal.startswith(f"{folder}: {FILE} cannot be read: ")
    assert refusal_of_folder(weights, folder) == refusal


def test_weights_that_are_read_again_are_refused_by_name(
    weights: NetWeights, tmp_path: Path
) -> None:
    weights.offload(keeps=False)
    folder = tmp_path / "right"
    (folder / FILE).unlink()
    with pytest.raises(ModelLoadError, match=f"^{folder}: {FILE} cannot be read"):
        weights.fetch()


@pytest.mark.parametrize("text", list(FAULTS)[1:])
def test_uploads_that_do_not_fit_are_refused(weights: NetWeights, text: str) -> None:
    tensors = {name: to_host(array) for name, array in arrays_of(text).items()}
    with pytest.raises(InvalidRequestError) as caught:
        weights.prepare_tensors(tensors)
    assert str(caught.value).startswith(text)
    assert caught.value.param == PARAM


def test_every_refusal_has_a_case(tmp_path: Path) -> None:
    folders = [write_wrong(tmp_path / str(place), text) for place, text in enumerate(FAULTS)]
    (write_net(tmp_path / "none") / FILE).unlink()
    passed = set[Site]().union(
        *(passed_sites(refusal_at_load(folder)) for folder in [*folders, tmp_path / "none"])
    )
    assert refusal_sites(module, ModelLoadError) <= passed
