"""Bodies and answers of nets in their three forms."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save

from mlx_parallm.adapters.safetensors import write_file
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.api.nets.bodies import (
    ACT,
    FILE_TYPE,
    JSON_TYPE,
    MAX_HEADER,
    PREDICT,
    Form,
    answer_form,
    read_body,
    write_answer,
)
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import MAX_ENTRIES, MAX_VALUES
from tests.nets import json_numpy

OBS = np.arange(8, dtype=np.float32).reshape(2, 4)


def body(content: Any) -> bytes:
    return json.dumps(content).encode()


def test_json_has_numbers_or_objects() -> None:
    read = read_body("application/json; charset=utf-8", body({"inputs": {"x": [1]}}), PREDICT)
    assert (read.fields, read.form) == ({"inputs": {"x": [1]}}, Form.NUMBERS)
    read = read_body(JSON_TYPE, body({"observations": json_numpy(OBS)}), ACT)
    assert read.form is Form.OBJECTS


def test_files_have_tensors_by_name_and_other_fields_as_metadata() -> None:
    tensors = {
        "obs": OBS,
        "observations.image": OBS.astype(np.uint8),
        "hidden_states.lstm.h": OBS,
        "episode_start": np.array([True, False]),
        "action_mask": np.array([[True, False]]),
    }
    metadata = {"model": "demo:cartpole", "seed": "7", "return": '["values"]', "sequence_id": "7"}
    read = read_body(FILE_TYPE, save(tensors, metadata), ACT)
    assert read.form is Form.FILE
    plain = {name: value for name, value in read.fields.items() if name in metadata}
    assert plain == {
        "model": "demo:cartpole",
        "seed": 7,
        "return": ["values"],
        "sequence_id": "7",
    }
    assert read.fields.keys() - metadata.keys() == {
        "observations",
        "hidden_states",
        "episode_start",
        "action_mask",
    }
    assert read.fields["observations"].keys() == {"obs", "image"}
    assert read.fields["hidden_states"].keys() == {"lstm.h"}
    assert read.fields["observations"]["obs"].tolist() == OBS.tolist()


def test_the_tensor_of_a_single_input_may_have_the_fields_name() -> None:
    read = read_body("application/octet-stream", save({"observations": OBS}), ACT)
    assert read.fields["observations"].tolist() == OBS.tolist()


def test_tensors_of_a_file_are_views_of_its_bytes() -> None:
    raw = save({"x": OBS})
    array = read_body(FILE_TYPE, raw, PREDICT).fields["inputs"]["x"]
    assert np.shares_memory(array, np.frombuffer(raw, np.uint8))


def test_bfloat16_is_exact() -> None:
    bits = np.array([0x3F80, 0xC0A1, 0x0001, 0x7F80, 0x8000], np.uint16)
    raw = write_file({"x": HostTensor(bits, is_bfloat16=True)}, {})
    array = read_body(FILE_TYPE, raw, PREDICT).fields["inputs"]["x"]
    assert array.dtype == np.float32
    assert array[0] == 1
    answer = write_answer(
        {"outputs": {"y": array}}, Form.FILE, bare="outputs", dtypes={"y": "bfloat16"}
    )
    assert bytes(answer.body) == write_file({"y": HostTensor(bits, is_bfloat16=True)}, {})


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "<i4", "<u4", "<i8", "<f2", "<f4", "<f8"])
def test_files_are_written_as_the_library_reads_them(dtype: str) -> None:
    arrays = {"a": np.array([[0, 1, 1]]).astype(dtype), "b": OBS.T, "c": np.zeros((0, 3), dtype)}
    raw = write_file({name: HostTensor(array) for name, array in arrays.items()}, {"k": "v"})
    read = load(raw)
    assert {name: array.tolist() for name, array in read.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    assert read["a"].dtype == arrays["a"].dtype


@pytest.mark.parametrize(
    ("tensors", "metadata", "why"),
    [
        ({"observations": OBS, "obs": OBS}, {}, "comes twice"),
        ({"obs": OBS, "observations": OBS}, {}, "comes twice"),
        ({"obs": OBS, "observations.obs": OBS}, {}, "comes twice"),
        ({"obs": OBS}, {"observations": "1"}, "comes twice"),
        ({"actions": OBS}, {"actions": "[1]"}, "comes twice"),
        ({"obs": OBS}, {"seed": "seven"}, "seed is no JSON"),
        ({"obs": OBS}, {"seed": "[" * 100_000}, "seed is no JSON"),
        ({"obs": OBS}, {"seed": "1" * MAX_HEADER}, "header has more than"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    tensors: dict[str, np.ndarray], metadata: dict[str, str], why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        read_body(FILE_TYPE, save(tensors, metadata), ACT)


def framed(header: Any, data: bytes = b"") -> bytes:
    head = header if isinstance(header, bytes) else body(header)
    return len(head).to_bytes(8, "little") + head + data


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "too short"),
        ((2**63).to_bytes(8, "little"), "ends before its header"),
        (framed({"x": ENTRY}), "other bytes"),
        (framed({"x": ENTRY}, b"12345678"), "its header describes"),
        (framed({"x": ENTRY | {"dtype": "F8_E4M3"}}, b"1234"), "F8_E4M3"),
        (framed({"x": ENTRY | {"dtype": "O"}}, b"1234"), "of O"),
        (framed({"x": ENTRY | {"shape": [-1]}}, b"1234"), "no shape"),
        (framed({"x": ENTRY | {"shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}), "too large"),
        (framed({"x": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]}}, b"\x02"), "0 nor"),
        (framed({"__metadata__": {"seed": 7}}), "no object of texts"),
        (framed({"__metadata__": []}), "no object of texts"),
        (framed([]), "no object"),
        (framed(b"{"), "cannot be read"),
    ],
)
def test_files_that_are_none_are_refused(raw: bytes, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        read_body(FILE_TYPE, raw, ACT)


@pytest.mark.parametrize(
    ("entry", "count"), [(b"[],", MAX_VALUES), (b"0,", MAX_ENTRIES + 1)], ids=["lists", "numbers"]
)
def test_too_many_values_are_refused_with_the_other_forms(entry: bytes, count: int) -> None:
    raw = b'{"observations": [' + entry * count + b"0]}"
    with pytest.raises(InvalidRequestError, match=r"__numpy__.*x-safetensors") as refusal:
        read_body(JSON_TYPE, raw, ACT)
    assert refusal.value.param == "observations"


def test_json_may_have_36_images() -> None:
    images = np.zeros((36, 84, 84, 4), np.uint8)
    read = read_body(JSON_TYPE, body({"observations": images.tolist()}), ACT)
    assert np.asarray(read.fields["observations"]).shape == images.shape


@pytest.mark.parametrize("content", [[], 1, None, "x"])
def test_json_is_an_object(content: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be a JSON object"):
        read_body(JSON_TYPE, body(content), ACT)


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/jsonx"])
def test_other_types_are_refused_with_those_that_there_are(content_type: str) -> None:
    with pytest.raises(InvalidRequestError, match="application/json or application/x-safetensors"):
        read_body(content_type, b"{}", ACT)


@pytest.mark.parametrize(
    ("accept", "own", "form"),
    [
        ("", Form.NUMBERS, Form.NUMBERS),
        ("*/*", Form.FILE, Form.FILE),
        ("*/*", Form.OBJECTS, Form.OBJECTS),
        ("application/json", Form.OBJECTS, Form.OBJECTS),
        ("application/json", Form.FILE, Form.NUMBERS),
        ("Application/X-Safetensors, */*", Form.NUMBERS, Form.FILE),
    ],
)
def test_answers_have_the_form_of_the_request_or_of_accept(
    accept: str, own: Form, form: Form
) -> None:
    assert answer_form(accept, own) is form


FIELDS = {
    "model": "m",
    "outputs": {"y": OBS, "z": np.array([1, 2])},
    "new_hidden_states": {"lstm.h": OBS},
    "entropy": None,
    "log_probs": OBS[0],
    "state_has_other_weights": False,
}


def test_answers_are_alike_in_all_forms() -> None:
    numbers = json.loads(bytes(write_answer(FIELDS, Form.NUMBERS, dtypes={}).body))
    objects = json.loads(bytes(write_answer(FIELDS, Form.OBJECTS, dtypes={}).body))
    file = bytes(write_answer(FIELDS, Form.FILE, bare="outputs", dtypes={}).body)
    assert numbers["outputs"] == {"y": OBS.tolist(), "z": [1, 2]}
    assert "entropy" not in numbers
    assert objects["outputs"] == {"y": json_numpy(OBS), "z": json_numpy(np.array([1, 2]))}
    assert numbers.keys() == objects.keys()
    tensors = load(file)
    assert tensors.keys() == {"y", "z", "new_hidden_states.lstm.h", "log_probs"}
    assert tensors["y"].tobytes() == OBS.tobytes()


def test_a_file_has_other_fields_as_metadata(tmp_path: Any) -> None:
    path = tmp_path / "answer.safetensors"
    path.write_bytes(write_answer(FIELDS, Form.FILE, dtypes={}).body)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"model": "m", "state_has_other_weights": "false"}


def test_numbers_that_json_lacks_are_null() -> None:
    odd = np.array([math.nan, math.inf, -math.inf, 1e300, -0.0])
    answer = write_answer({"x": odd}, Form.NUMBERS, dtypes={})
    assert bytes(answer.body) == b'{"x":[null,null,null,1e+300,-0.0]}'
    objects = json.loads(bytes(write_answer({"x": odd}, Form.OBJECTS, dtypes={}).body))
    assert objects["x"] == json_numpy(odd)
