"""ART's policies and in-flight updates, over a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.control.art.policies import MAX_REMEMBERED, ArtPolicies, PolicySpans
from mlx_parallm.api.turns.samples import VersionSpans
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import InvalidRequestError
from tests.api_app import make_app
from tests.fake_engine import FakeEngine

SLOT = "policy:active"
PATH = "/art/in_flight_lora_update"
ASKS = {"extra_fields": ["engine_data"]}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(engine: FakeEngine) -> FastAPI:
    return make_app(engine, ServerConfig())


async def send(app: FastAPI, path: str, body: Any = None, **more: Any) -> httpx2.Response:
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://here:8000") as client:
        method = "GET" if body is None else "POST"
        return await client.request(method, path, json=body, **more)


def update(step: int, expected: int, **changes: Any) -> dict[str, Any]:
    return {
        "operation_id": f"operation-{step}",
        "model_name": SLOT,
        "lora_slot": SLOT,
        "lora_path": f"/x/{step}",
        "generation_id": f"policy@{step}",
        "expected_generation_id": f"policy@{expected}",
        "policy_version": step,
        **changes,
    }


def loads(engine: FakeEngine) -> list[dict[str, Any]]:
    return [options for name, options in engine.control.calls if name == "load_adapter_folder"]


async def test_art_reads_its_capabilities(app: FastAPI) -> None:
    assert (await send(app, "/art/capabilities")).json() == {
        "runtime": "art_vllm",
        "protocol_version": 5,
        "binary_routed_experts": False,
        "fast_metrics": None,
        "inplace_lora_load": True,
        "in_flight_lora_updates": True,
        "policy_token_spans": True,
    }


async def test_a_slot_goes_from_one_generation_to_the_next(
    app: FastAPI, engine: FakeEngine
) -> None:
    for step, expected in ((0, 0), (1, 0), (5, 1)):
        answer = (await send(app, PATH, update(step, expected))).json()
        sequence = answer.pop("update_seq")
        assert answer == {
            "status": "updated",
            "model_name": SLOT,
            "lora_slot": SLOT,
            "generation_id": f"policy@{step}",
            "policy_version": step,
        }
        assert sequence == len(loads(engine))
        # A client that lost the answer asks again.
        again = (await send(app, PATH, update(step, expected))).json()
        assert again == {**answer, "update_seq": sequence}
    versions = [(load["path"], load["version"], load["expected_version"]) for load in loads(engine)]
    assert versions == [
        ("/x/0", "policy@0", None),
        ("/x/1", "policy@1", "policy@0"),
        ("/x/5", "policy@5", "policy@1"),
    ]
    assert [load["replaces"] for load in loads(engine)] == [False, True, True]


async def test_a_repetition_is_of_what_serves(app: FastAPI, engine: FakeEngine) -> None:
    first = (await send(app, PATH, update(0, 0))).json()
    assert (await send(app, PATH, update(1, 0))).is_success
    assert (await send(app, PATH, update(0, 0))).status_code == 412
    await send(app, "/v1/unload_lora_adapter", {"lora_name": SLOT})
    assert (await send(app, PATH, update(1, 0))).status_code == 404
    again = (await send(app, PATH, update(0, 0))).json()
    assert again["update_seq"] > first["update_seq"]
    assert len(loads(engine)) == 3


async def test_updates_of_one_time_come_one_after_the_other(
    app: FastAPI, engine: FakeEngine
) -> None:
    await send(app, PATH, update(0, 0))
    bodies = [update(step, 0) for step in (1, 1, 2, 3)]
    answers = await asyncio.gather(*(send(app, PATH, body) for body in bodies))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 412, 412]
    assert len(loads(engine)) == 2


async def test_what_another_route_loaded_takes_the_first_generation_for_its_own(
    app: FastAPI, engine: FakeEngine
) -> None:
    await send(app, "/v1/load_lora_adapter", {"lora_name": SLOT, "lora_path": "/x/7"})
    assert (await send(app, PATH, update(8, 7))).is_success
    assert loads(engine)[-1]["expected_version"] == "1"
    assert (await send(app, PATH, update(9, 7))).status_code == 412


async def test_a_trainer_that_was_started_anew_finds_its_generation(
    app: FastAPI, engine: FakeEngine
) -> None:
    first = (await send(app, PATH, update(3, 3))).json()
    again = update(3, 3, operation_id="another")
    assert (await send(app, PATH, again)).json() == first
    assert len(loads(engine)) == 1
    for change in ({"lora_path": "/x/other"}, {"policy_version": 4}):
        body = {**again, "operation_id": "a third", **change}
        response = await send(app, PATH, body)
        assert (response.status_code, response.json()["error"]["code"]) == (
            412,
            "version_mismatch",
        )


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (update(2, 0), 412, "expected_generation_id", "version_mismatch"),
        (update(2, 1, operation_id="operation-1"), 400, "operation_id", "idempotency_conflict"),
        (update(2, 1, model_name="p", lora_slot=None), 404, "lora_slot", "not_found"),
        (update(2, 1, lora_slot="other"), 400, "lora_slot", None),
        (update(2, 1, is_3d_lora_weight=True), 501, None, "not_implemented"),
        (update(2, 1, operation_id=""), 400, "operation_id", None),
        (update(2, 1, policy_version=-1), 400, "policy_version", None),
        (update(2, 1, generation_id=None), 400, "generation_id", None),
        (update(2, 1, lora_path=7), 400, "lora_path", None),
    ],
)
async def test_a_refused_update_changes_nothing(
    app: FastAPI, engine: FakeEngine, body: Any, status: int, param: str | None, code: str | None
) -> None:
    await send(app, PATH, update(1, 1))
    response = await send(app, PATH, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)
    assert engine.control.adapters()[0].version == "policy@1"
    assert len(loads(engine)) == 1
    assert (await send(app, PATH, update(2, 1))).is_success


async def test_an_update_that_failed_may_be_tried_again(app: FastAPI, engine: FakeEngine) -> None:
    await send(app, PATH, update(0, 0))
    engine.control.refusal = InvalidRequestError("No such adapter.", param="lora_path")
    look = engine.control.look
    response = await send(app, PATH, update(1, 0))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_path")
    assert [adapter.version for adapter in await look()] == ["policy@0"]
    engine.control.refusal = None
    assert (await send(app, PATH, update(1, 0))).is_success


async def test_only_the_admin_key_updates(engine: FakeEngine) -> None:
    app = make_app(engine, ServerConfig(api_keys=("one",), admin_api_keys=("admin",)))
    for key, status in (("", 401), ("one", 401), ("admin", 200)):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        assert (await send(app, PATH, update(0, 0), headers=headers)).status_code == status
    headers = {"authorization": "Bearer one"}
    assert (await send(app, "/art/capabilities", headers=headers)).status_code == 200
    assert (await send(app, "/art/capabilities")).status_code == 401


async def test_chats_tell_policies_where_they_are_asked(app: FastAPI) -> None:
    await send(app, PATH, update(4, 4))
    chat = {"model": SLOT, "messages": [{"role": "user", "content": "hi"}], "n": 2}
    answer = (await send(app, "/v1/chat/completions", chat)).json()
    assert "policy_token_spans" not in answer["choices"][0]
    for other in (7, {"extra_fields": None}, {"extra_fields": ["other"]}):
        answer = (await send(app, "/v1/chat/completions", {**chat, "nvext": other})).json()
        assert "policy_token_spans" not in answer["choices"][0]
    chat |= {"nvext": ASKS, "return_token_ids": True}
    answer = (await send(app, "/v1/chat/completions", chat)).json()
    num_prompt = len(answer["prompt_token_ids"])
    for choice in answer["choices"]:
        (made,), (prompt,) = choice["policy_token_spans"], choice["prompt_policy_token_spans"]
        assert (made["start_token"], made["end_token"]) == (0, len(choice["token_ids"]))
        assert (prompt["start_token"], prompt["end_token"]) == (1, num_prompt)
        # The scripted engine's tokens are always of the label "default".
        assert (made["lora_slot"], made["generation_id"]) == (SLOT, f"{SLOT}/default")
    streamed = await send(app, "/v1/chat/completions", {**chat, "stream": True})
    assert streamed.text.count('"policy_token_spans"') == 2
    assert streamed.text.count('"prompt_policy_token_spans"') == 2


@given(
    parts=st.lists(st.tuples(st.sampled_from(["p@1", "p@2", "x"]), st.integers(0, 3)), max_size=9),
    num_prompt_tokens=st.integers(0, 4),
)
def test_spans_partition_prompt_and_tokens(
    parts: list[tuple[str, int]], num_prompt_tokens: int
) -> None:
    policies = ArtPolicies()
    for step in (1, 2):
        policies.begin("p:active", f"p@{step}", step)
    versions = VersionSpans()
    wanted: list[int] = []
    for label, count in parts:
        versions.add(label, count)
        wanted += [{"p@1": 1, "p@2": 2}.get(label, 0)] * count
    spans = PolicySpans(
        policies=policies, slot="p:active", label="p@2", num_prompt_tokens=num_prompt_tokens
    ).of(versions)
    made, prompt = spans["policy_token_spans"], spans["prompt_policy_token_spans"]
    steps = [span["policy_version"] for span in made for _ in range(*ends(span))]
    assert steps == wanted
    assert [number for span in made for number in range(*ends(span))] == list(range(len(wanted)))
    assert [number for span in prompt for number in range(*ends(span))] == list(
        range(1, num_prompt_tokens)
    )
    assert all(span["policy_version"] == (wanted[0] if wanted else 2) for span in prompt)


def ends(span: dict[str, Any]) -> tuple[int, int]:
    return span["start_token"], span["end_token"]


@pytest.mark.parametrize(
    ("slot", "label", "step"),
    [("p@12", "1", 12), ("p:active", "p@3", 3), ("p", "default", 0), ("p@x", "7", 0)],
)
def test_what_art_did_not_name_is_called_by_its_step(slot: str, label: str, step: int) -> None:
    policy = ArtPolicies().of(slot, label)
    assert (policy.policy_version, policy.update_seq) == (step, 0)
    assert ArtPolicies().of(slot, "other").generation_id != policy.generation_id


def test_what_is_remembered_is_bounded() -> None:
    policies = ArtPolicies()
    for step in range(MAX_REMEMBERED + 1):
        policies.begin("p", str(step), step)
        policies.settle(str(step), {}, step)
    assert policies.find("p", "0") is None
    assert policies.result_of("0", {}) is None
    assert policies.find("p", "1") is not None
    assert policies.result_of("1", {}) == 1
