"""SGLang's ``/generate`` and ``/abort_request``, and atropos' body for vLLM."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx2
import pytest

from tests.server_process import ServerProcess

IDS = [264, 75, 419]


def send(server: ServerProcess, status: int = 200, method: str = "POST", **body: Any) -> Any:
    response = httpx2.request(method, f"{server.url}/generate", json=body)
    assert response.status_code == status, response.text
    return response.json()


def chunks_of(text: str) -> list[dict[str, Any]]:
    *parts, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_what_slime_and_atropos_read(live_server: ServerProcess) -> None:
    params = {"max_new_tokens": 6, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
    body = {
        "input_ids": IDS,
        "sampling_params": params | {"made_up": 1},
        "return_logprob": True,
        "return_text_in_logprobs": False,
        "return_prompt_token_ids": True,
        "rid": "one",
        "routing_key": "k",
    }
    response = httpx2.put(f"{live_server.url}/generate", json=body)
    assert response.headers["x-ignored-fields"] == "sampling_params.made_up"
    answer = response.json()
    meta = answer["meta_info"]
    assert meta["id"] == "one"
    assert answer["prompt_token_ids"] == IDS
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert [item[1] for item in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(item[0] <= 0 and item[2] is None for item in meta["output_token_logprobs"])
    assert meta["output_token_logprobs_length"] == meta["completion_tokens"] == 6
    assert meta["input_token_logprobs"] == []
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]
    assert meta["prompt_tokens"] == 3


def test_prompt_logprobs_begin_with_a_null(live_server: ServerProcess) -> None:
    body: dict[str, Any] = {
        "input_ids": IDS * 3,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    whole = send(live_server, **body, logprob_start_len=0)["meta_info"]
    later = send(live_server, **body, logprob_start_len=4)["meta_info"]
    assert whole["input_token_logprobs"][0][:2] == [None, IDS[0]]
    assert later["input_token_logprobs"][0][:2] == [None, IDS[1]]
    assert [entry[1:] for entry in later["input_token_logprobs"]] == [
        entry[1:] for entry in whole["input_token_logprobs"][4:]
    ]
    for entry, other in zip(
        later["input_token_logprobs"][1:], whole["input_token_logprobs"][5:], strict=True
    ):
        assert entry[0] == pytest.approx(other[0], abs=1e-4)
    assert later["input_top_logprobs"][0] is None
    assert [len(entry) for entry in later["input_top_logprobs"][1:]] == [2] * 4
    assert whole["output_token_logprobs"] == []


def test_batches_and_samples_are_prompt_major(live_server: ServerProcess) -> None:
    params = {"n": 2, "max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
    answer = send(
        live_server,
        text=["one", "two"],
        sampling_params=[params, params | {"max_new_tokens": 5}],
        rid="many",
    )
    assert [sample["meta_info"]["completion_tokens"] for sample in answer] == [4, 4, 5, 5]
    ids = [sample["meta_info"]["id"] for sample in answer]
    assert ids == ["many_0-0", "many_0-1", "many_1-0", "many_1-1"]
    assert answer[0]["output_ids"] == answer[1]["output_ids"]
    (alone,) = send(live_server, input_ids=[IDS], sampling_params={"max_new_tokens": 1})
    assert len(alone["output_ids"]) == 1


def test_a_stream_is_cumulative(live_server: ServerProcess) -> None:
    body = {
        "input_ids": [IDS, IDS[:2]],
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "return_entropy": True,
    }
    whole = send(live_server, **body)
    response = httpx2.post(f"{live_server.url}/generate", json=body | {"stream": True})
    chunks = chunks_of(response.text)
    for index, sample in enumerate(whole):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        lengths = [len(chunk["output_ids"]) for chunk in mine]
        assert lengths == sorted(set(lengths))
        assert lengths[-1] == 8
        assert all(
            chunk["output_ids"] == sample["output_ids"][: len(chunk["output_ids"])]
            for chunk in mine
        )
        assert not any(chunk["meta_info"]["finish_reason"] for chunk in mine[:-1])
        assert mine[-1]["text"] == sample["text"]
        meta = mine[-1]["meta_info"]
        assert len(meta["output_token_logprobs"]) == len(meta["output_token_entropy"]) == 8


def test_structure_stops_and_named_tokens(live_server: ServerProcess) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
                         "additionalProperties": False})  # fmt: skip
    answer = send(live_server, text="x", sampling_params={"json_schema": schema, "temperature": 0})
    assert json.loads(answer["text"]) == {"a": 1}
    params = {"regex": "ab+c", "stop": ["b"], "temperature": 0, "max_new_tokens": 20}
    answer = send(live_server, text="x", sampling_params=params | {"no_stop_trim": True})
    assert answer["text"] == "ab"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b"}
    answer = send(
        live_server,
        text="x",
        sampling_params={"max_new_tokens": 2, "ignore_eos": True},
        return_logprob=True,
        token_ids_logprob=[5, 6],
    )
    named = answer["meta_info"]["output_token_ids_logprobs"]
    assert [[entry[1] for entry in row] for row in named] == [[5, 6], [5, 6]]


def test_the_body_of_atropos_for_vllm(live_server: ServerProcess) -> None:
    body = {
        "prompt": {"prompt_token_ids": IDS},
        "logprobs": 0,
        "n": 2,
        "max_tokens": 5,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    answer = send(live_server, **body)
    assert answer["finish_reasons"] == ["length", "length"]
    for token_ids, entries in zip(answer["token_ids"], answer["logprobs"], strict=True):
        # atropos reads the log-probabilities in this way.
        assert [int(next(iter(item[0]))) for item in entries] == token_ids
        assert all(next(iter(item[0].values())) <= 0 for item in entries)
    scored = send(live_server, prompt={"prompt_token_ids": IDS}, prompt_logprobs=1, max_tokens=1)
    assert scored["prompt_logprobs"][0] is None
    assert [
        str(token_id) in row
        for token_id, row in zip(IDS[1:], scored["prompt_logprobs"][1:], strict=True)
    ]


@pytest.mark.parametrize("how", [{"abort_all": True}, {"rid": "abort-me"}])
def test_an_abort_returns_partial_tokens(live_server: ServerProcess, how: dict[str, Any]) -> None:
    def abort() -> None:
        while not httpx2.get(f"{live_server.url}/load").json()["num_running"]:
            pass
        httpx2.post(f"{live_server.url}/abort_request", json=how).raise_for_status()

    thread = threading.Thread(target=abort)
    thread.start()
    answer = send(
        live_server,
        input_ids=[IDS, IDS],
        sampling_params={"max_new_tokens": 1900, "ignore_eos": True},
        return_logprob=True,
        rid="abort-me",
    )
    thread.join()
    for sample in answer:
        meta = sample["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert len(sample["output_ids"]) == len(meta["output_token_logprobs"]) < 1900
    assert httpx2.get(f"{live_server.url}/load").json()["server_load"] == 0


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"text": None}, 400, "input_ids"),
        ({"input_ids": [1]}, 400, "input_ids"),
        ({"text": ""}, 400, "text"),
        ({"text": []}, 400, "text"),
        ({"text": None, "input_ids": [[1], [10**6]]}, 400, "input_ids"),
        ({"sampling_params": {"temperature": -1}}, 400, "sampling_params"),
        ({"sampling_params": {"stop_regex": "("}}, 400, "sampling_params.stop_regex"),
        ({"sampling_params": {"max_new_tokens": 10**6}}, 400, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"regex": "("}}, 400, "sampling_params.regex"),
        ({"sampling_params": [{}, {}]}, 400, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, 400, "sampling_params.n"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, 400, "rid"),
        ({"return_logprob": True, "logprob_start_len": 99}, 400, "logprob_start_len"),
        ({"return_logprob": True, "top_logprobs_num": 10**6}, 400, "top_logprobs_num"),
        ({"top_logprobs_num": -1}, 400, "top_logprobs_num"),
        (
            {"return_logprob": True, "token_ids_logprob": [1], "top_logprobs_num": 1},
            400,
            "token_ids_logprob",
        ),
        ({"lora_path": "nobody"}, 404, "lora_path"),
        ({"image_data": "x"}, 400, "image_data"),
        ({"text": None, "prompt": {"prompt_token_ids": [1]}, "stream": True}, 400, "stream"),
        ({"text": None, "prompt": {"prompt_token_ids": []}}, 400, "prompt"),
        ({"text": ["a"] * 3000}, 400, "text"),
    ],
)
def test_a_bad_body_names_its_field(
    live_server: ServerProcess, change: dict[str, Any], status: int, param: str
) -> None:
    body = {"text": "a"} | change
    assert send(live_server, status, **body)["error"]["param"] == param
