"""Requests of Open Inference Protocol v2, as objects and as bytes, against a net's signature."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from mlx_parallm.api.nets.oip.body import HEADER_LENGTH
from mlx_parallm.api.nets.oip.inference import Inference, read_inference
from mlx_parallm.nets.model import NetModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.nets import NetSignature, SequenceUse, TensorSpec

OBS = np.arange(8, dtype=np.float32).reshape(2, 4) / 3


def spec(name: str, dtype: str, *sizes: int) -> TensorSpec:
    return TensorSpec(name, dtype, (-1, *sizes))


def net(*inputs: TensorSpec, states: tuple[TensorSpec, ...] = (), non_finite: bool = False) -> Any:
    outputs = (spec("logits", "float32", 2), spec("value", "float32", 1))
    if any(each.has_time for each in inputs):
        outputs = (spec("logits", "float32", -1, 2),)
    signature = NetSignature(
        inputs=inputs or (spec("obs", "float32", 4),),
        outputs=outputs,
        states=states,
        allows_non_finite=non_finite,
    )
    return NetModel(
        names=("a", "b"),
        root="/a",
        created=0,
        signature=signature,
        weight_bytes=0,
        max_rows=64,
    )


def tensor(**changes: Any) -> dict[str, Any]:
    usual = {"name": "obs", "datatype": "FP32", "shape": [2, 4], "data": OBS.ravel().tolist()}
    return {name: value for name, value in (usual | changes).items() if value is not ...}


def binary(size: Any, **changes: Any) -> dict[str, Any]:
    return tensor(data=..., parameters={"binary_data_size": size}, **changes)


def read(model: Any, content: Any, *behind: bytes, header: str | None = None) -> Inference:
    text = json.dumps(content).encode()
    length = str(len(text)) if behind and header is None else header
    return read_inference(model, text + b"".join(behind), length, client="me", request_id="infer-1")


def refusal(model: Any, content: Any, *behind: bytes, header: str | None = None) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        read(model, content, *behind, header=header)
    assert caught.value.param
    return str(caught.value)


def test_numbers_may_be_flat_or_nested() -> None:
    for data in (OBS.ravel().tolist(), OBS.tolist()):
        inference = read(net(), {"inputs": [tensor(data=data)]})
        assert inference.request.inputs["obs"].tobytes() == OBS.tobytes()
        assert (inference.request.model, inference.request.num_rows) == ("a", 2)
        assert inference.request.sequence is None


@pytest.mark.parametrize("name", ["sequence_start", "sequence_end"])
@pytest.mark.parametrize("ids", [{}, {"sequence_id": 0}, {"sequence_id": ""}])
def test_marks_of_a_sequence_need_its_id(name: str, ids: dict[str, Any]) -> None:
    model = net(states=(spec("sum.h", "float32", 1),))
    parameters = ids | {name: True}
    assert f"{name} needs" in refusal(model, {"inputs": [tensor()], "parameters": parameters})
    read(model, {"inputs": [tensor()], "parameters": ids | {name: False}})


@pytest.mark.parametrize("pad", range(8))
def test_bytes_behind_an_object_of_any_length(pad: int) -> None:
    content = {"id": "x" * pad, "inputs": [binary(32)]}
    inference = read(net(), content, OBS.tobytes())
    array = inference.request.inputs["obs"]
    assert array.flags.aligned
    assert array.tobytes() == OBS.tobytes()


@pytest.mark.parametrize(
    ("dtype", "datatype", "values"),
    [
        ("bool", "BOOL", np.array([[True, False]])),
        ("uint8", "UINT8", np.array([[0, 255]], np.uint8)),
        ("int8", "INT8", np.array([[-128, 127]], np.int8)),
        ("uint16", "UINT16", np.array([[0, 65535]], np.uint16)),
        ("int16", "INT16", np.array([[-32768, 1]], np.int16)),
        ("uint32", "UINT32", np.array([[0, 2**32 - 1]], np.uint32)),
        ("int32", "INT32", np.array([[-(2**31), 1]], np.int32)),
        ("uint64", "UINT64", np.array([[0, 2**63 - 1]], np.uint64)),
        ("int64", "INT64", np.array([[-(2**63), 2**63 - 1]], np.int64)),
        ("float16", "FP16", np.array([[0.1, -65504]], np.float16)),
        ("float32", "FP32", np.array([[0.1, -3e38]], np.float32)),
    ],
)
def test_every_datatype_as_numbers_and_as_bytes(dtype: str, datatype: str, values: Any) -> None:
    model = net(spec("obs", dtype, 2))
    facts = {"datatype": datatype, "shape": [1, 2]}
    numbers = read(model, {"inputs": [tensor(data=values.tolist(), **facts)]})
    raw = values.tobytes()
    as_bytes = read(model, {"inputs": [binary(len(raw), **facts)]}, raw)
    for inference in (numbers, as_bytes):
        array = inference.request.inputs["obs"]
        assert (array.dtype, array.tobytes()) == (values.dtype, raw)


def test_bfloat16_is_widened() -> None:
    model = net(spec("obs", "bfloat16", 2))
    raw = np.array([0x3F80, 0xC000], "<u2").tobytes()
    inference = read(model, {"inputs": [binary(4, datatype="BF16", shape=[1, 2])]}, raw)
    assert inference.request.inputs["obs"].tolist() == [[1.0, -2.0]]


def test_bytes_of_several_inputs_come_in_the_order_of_the_object() -> None:
    model = net(spec("a", "uint8", 1), spec("b", "float32", 1), spec("c", "uint8", 2))
    inputs = [
        binary(2, name="c", datatype="UINT8", shape=[1, 2]),
        tensor(name="b", shape=[1, 1], data=[0.5]),
        binary(1, name="a", datatype="UINT8", shape=[1, 1]),
    ]
    arrays = read(model, {"inputs": inputs}, b"\1\2", b"\3").request.inputs
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "a": [[3]],
        "b": [[0.5]],
        "c": [[1, 2]],
    }


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([tensor(name="x")], "'x'; expected obs: float32 [rows, 4]"),
        ([tensor(), tensor()], "inputs.obs occurs twice"),
        ([tensor(datatype="FP64")], "inputs.obs is FP64; expected FP32"),
        ([tensor(datatype="STRING")], "inputs.obs is STRING; expected FP32"),
        ([tensor(name="x", datatype="STRING")], "datatype other than BOOL"),
        ([tensor(data=...)], "needs either data or the parameter binary_data_size"),
        ([tensor(parameters={"binary_data_size": 32})], "needs either data"),
        ([tensor(parameters={"shared_memory_region": "r"}, data=...)], "is not supported"),
        ([tensor(parameters={"shared_memory_region": "r"})], "shared_memory_region, which is not"),
        (
            [tensor(data=[1.0])],
            "has data of the shape [1], which is neither [2, 4] nor a list of 8",
        ),
        ([tensor(data=OBS.reshape(4, 2).tolist())], "shape [4, 2], which is neither"),
        ([tensor(data=[0.5] * 9)], "shape [9], which is neither"),
        ([tensor(data=[[1, 2], [3]])], "different lengths"),
        ([tensor(data=["a"] * 8)], "not a number"),
        ([tensor(data=[None] * 8)], "not a number"),
        ([tensor(data={"b64": "AA=="})], "data"),
        ([tensor(shape=[8])], "has the shape [8]"),
        ([tensor(shape=[1, 8])], "has the shape [1, 8]"),
        ([tensor(shape=[0, 4], data=[])], "0 rows"),
        ([tensor(shape=[65, 4], data=[0] * 260)], "1 to 64"),
        ([tensor(shape="-1")], "shape"),
        ([tensor(shape=[-1, 4])], "shape"),
        ([tensor(shape=[2.0, 4])], "shape"),
        ([tensor(data=[float("nan")] * 8)], "inputs.obs has NaN or infinite"),
        ([tensor(data=[1e300] * 8)], "inputs.obs has NaN or infinite"),
        ([], "inputs"),
        ("obs", "inputs"),
        ([binary(-1)], "binary_data_size"),
        ([binary("32")], "binary_data_size"),
    ],
)
def test_wrong_inputs_are_refused_by_name(inputs: Any, said: str) -> None:
    assert said in refusal(net(), {"inputs": inputs})


@pytest.mark.parametrize(
    ("size", "behind", "said"),
    [
        (32, b"", "only 0 bytes are left"),
        (32, bytes(31), "only 31 bytes are left"),
        (2**40, bytes(32), "only 32 bytes are left"),
        (31, bytes(31), "31 bytes, which is not what FP32 [2, 4] takes"),
        (36, bytes(36), "36 bytes, which is not what FP32 [2, 4] takes"),
        (32, bytes(33), "33 bytes behind its JSON object"),
        (0, b"", "0 bytes"),
    ],
)
def test_wrong_sizes_of_bytes_are_refused(size: int, behind: bytes, said: str) -> None:
    assert said in refusal(net(), {"inputs": [binary(size)]}, behind)


def test_bytes_without_the_header_are_no_json() -> None:
    text = json.dumps({"inputs": [binary(32)]}).encode()
    with pytest.raises(InvalidRequestError, match="not JSON"):
        read_inference(net(), text + OBS.tobytes(), None, client="", request_id="")


@pytest.mark.parametrize("header", ["", "-1", "0", "99999", "1.5", "٣", "9" * 5000, " 3"])
def test_a_wrong_length_of_the_object_is_refused(header: str) -> None:
    said = refusal(net(), {"inputs": [tensor()]}, header=header)
    assert HEADER_LENGTH in said
    assert len(said) < 300


@pytest.mark.parametrize("missing", [-1, 1])
def test_a_length_that_cuts_the_object_is_named(missing: int) -> None:
    # Clients count characters instead of bytes.
    text = json.dumps({"id": "ü", "inputs": [binary(32)]}, ensure_ascii=False)
    header = str(len(text.encode()) - missing)
    with pytest.raises(InvalidRequestError, match=f"{HEADER_LENGTH} says that {header} bytes"):
        read_inference(
            net(), text.encode() + OBS.tobytes(), header, client="", request_id="infer-1"
        )


def test_odd_booleans_are_refused() -> None:
    model = net(spec("obs", "bool", 1))
    assert "boolean" in refusal(
        model, {"inputs": [binary(1, datatype="BOOL", shape=[1, 1])]}, b"\2"
    )


def test_non_finite_numbers_pass_where_the_net_takes_them() -> None:
    model = net(non_finite=True)
    inference = read(model, {"inputs": [tensor(data=[float("nan")] * 8)]})
    assert np.isnan(inference.request.inputs["obs"]).all()


def test_rows_must_agree() -> None:
    model = net(spec("a", "float32", 1), spec("b", "float32", 1))
    inputs = [tensor(name="a", shape=[1, 1], data=[1]), tensor(name="b", shape=[2, 1], data=[1, 2])]
    assert "different numbers of rows" in refusal(model, {"inputs": inputs})


def test_outputs_in_the_forms_that_a_request_wants() -> None:
    def forms(**more: Any) -> list[tuple[str, bool]]:
        wanted = read(net(), {"inputs": [tensor()], **more}).wanted
        return [(each.spec.name, each.is_binary) for each in wanted]

    everything: dict[str, Any] = {"parameters": {"binary_data_output": True}}
    plain = [{"name": "value"}]
    assert forms() == [("logits", False), ("value", False)]
    assert forms(**everything) == [("logits", True), ("value", True)]
    assert forms(outputs=plain) == [("value", False)]
    # An output that says nothing of its form follows the request's.
    assert forms(outputs=plain, **everything) == [("value", True)]
    own = [{"name": "value", "parameters": {"binary_data": False}}, {"name": "logits"}]
    assert forms(outputs=own, **everything) == [("value", False), ("logits", True)]
    named = [{"name": "logits", "parameters": {"binary_data": True}}]
    assert forms(outputs=named) == [("logits", True)]


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([{"name": "q"}], "outputs.q is unknown; there are logits, value"),
        ([{"name": "value"}, {"name": "value"}], "outputs.value occurs twice"),
        ([{"name": "value", "parameters": {"classification": 2}}], "classification"),
        ([{"name": "value", "parameters": {"shared_memory_region": "r"}}], "shared_memory_region"),
        ([{"name": "value", "parameters": {"binary_data": 1}}], "binary_data"),
        ([{}], "name"),
    ],
)
def test_wrong_outputs_are_refused(outputs: Any, said: str) -> None:
    assert said in refusal(net(), {"inputs": [tensor()], "outputs": outputs})


RECURRENT = net(spec("obs", "float32", -1, 4), states=(spec("lstm.h", "float32", 1, 8),))


@pytest.mark.parametrize(
    ("parameters", "sequence"),
    [
        ({"sequence_id": 0}, None),
        ({"sequence_id": ""}, None),
        ({"sequence_id": 7}, SequenceUse(owner="me", sequence_id="7")),
        (
            {"sequence_id": "x", "sequence_start": True, "sequence_end": True},
            SequenceUse(owner="me", sequence_id="x", is_start=True, is_end=True),
        ),
        ({"sequence_id": 2**64 - 1}, SequenceUse(owner="me", sequence_id=str(2**64 - 1))),
        ({"priority": 1, "timeout": 10, "anything": [1]}, None),
    ],
)
def test_sequences(parameters: Any, sequence: SequenceUse | None) -> None:
    body = {"inputs": [tensor()], "parameters": parameters}
    assert read(RECURRENT, body).request.sequence == sequence


def test_what_nothing_reads_is_known() -> None:
    more = {"model_name": "a", "user": 1, "parameters": {"priority": 1, "sequence_id": 0}}
    body = read(net(), {"inputs": [tensor(extra=1, parameters={"shared": 1})], **more}).body
    assert body.ignored == {
        "user",
        "inputs.extra",
        "inputs.parameters.shared",
        "parameters.priority",
    }


@pytest.mark.parametrize("value", [-1, 2**64, 1.5, True, "x" * 1000, [1]])
def test_wrong_ids_of_sequences_are_refused(value: Any) -> None:
    said = refusal(RECURRENT, {"inputs": [tensor()], "parameters": {"sequence_id": value}})
    assert "sequence_id" in said


def test_a_net_without_state_has_no_sequences() -> None:
    said = refusal(net(), {"inputs": [tensor()], "parameters": {"sequence_id": 1}})
    assert "sequence_id" in said


def test_time_may_be_left_out() -> None:
    inference = read(RECURRENT, {"inputs": [tensor()]})
    assert inference.request.inputs["obs"].shape == (2, 4)
    timed = read(RECURRENT, {"inputs": [tensor(shape=[1, 2, 4])]})
    assert timed.request.inputs["obs"].shape == (1, 2, 4)
    assert "0 times" in refusal(RECURRENT, {"inputs": [tensor(shape=[1, 0, 4], data=[])]})


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 300])
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        read_inference(net(), text, None, client="", request_id="")
