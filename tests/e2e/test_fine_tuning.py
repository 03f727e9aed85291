"""Fine-tuning jobs of a real server, by OpenAI's own client."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import openai
import pytest
from openai.types.fine_tuning import FineTuningJob

from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
ANSWER = "zq zq zq"
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"Say it, number {number}."},
            {"role": "assistant", "content": ANSWER},
        ]
    }
    for number in range(16)
]
HYPER: dict[str, Any] = {"n_epochs": 2, "batch_size": 8, "learning_rate_multiplier": 40}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--model", MODEL, "demo:mlm")
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=None)


def upload(client: openai.OpenAI, rows: Sequence[Any]) -> str:
    """Upload a file of rows; return its id."""
    content = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    file = io.BytesIO(content.encode())
    return client.files.create(file=("rows.jsonl", file), purpose="fine-tune").id


def create(client: openai.OpenAI, **fields: Any) -> FineTuningJob:
    settings: dict[str, Any] = {
        "model": MODEL,
        "method": {"type": "supervised", "supervised": {"hyperparameters": HYPER}},
        **fields,
    }
    if "training_file" not in settings:
        settings["training_file"] = upload(client, CHATS)
    return client.fine_tuning.jobs.create(**settings)


def ended(client: openai.OpenAI, server: ServerProcess, job: FineTuningJob) -> FineTuningJob:
    """Return a job that has ended, or was paused."""
    while (job := client.fine_tuning.jobs.retrieve(job.id)).status in ("queued", "running"):
        # The events of its session end when a run of it does.
        session = job.to_dict()["session_id"]
        httpx2.get(f"{server.url}/v1/training/sessions/{session}/events", timeout=None)
    return job


def test_a_job_from_its_file_to_its_model(client: openai.OpenAI, server: ServerProcess) -> None:
    job = create(
        client,
        validation_file=upload(client, CHATS[:4]),
        suffix="mine",
        seed=3,
        metadata={"a": "b"},
    )
    assert job.object == "fine_tuning.job"
    job = ended(client, server, job)
    assert (job.status, job.error) == ("succeeded", None)
    assert job.fine_tuned_model == f"ft:{MODEL}:mine:{job.id}"
    assert job.metadata == {"a": "b"}
    assert job.seed == 3
    assert job.hyperparameters.batch_size == 8
    assert (job.trained_tokens or 0) > 0
    checkpoints = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert [each.step_number for each in checkpoints] == [4, 2]
    losses = [each.metrics.valid_loss for each in checkpoints]
    assert None not in losses
    served = [job.fine_tuned_model, *(each.fine_tuned_model_checkpoint for each in checkpoints)]
    assert set(served) <= {model.id for model in client.models.list()}
    for name in served:
        said = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "Hi"}], max_tokens=4
        )
        assert said.model == name
    (result,) = job.result_files
    table = client.files.content(result).text.splitlines()
    assert table[0].split(",")[:3] == ["step", "train_loss", "valid_loss"]
    assert len(table) == 5


def test_events_come_in_pages(client: openai.OpenAI, server: ServerProcess) -> None:
    job = ended(client, server, create(client))
    everything = list(client.fine_tuning.jobs.list_events(job.id, limit=2))
    numbers = [int(event.id.rpartition("-")[2]) for event in everything]
    assert numbers == list(reversed(range(len(numbers))))
    metrics = [event for event in everything if event.type == "metrics"]
    assert len(metrics) == 4
    data: Any = metrics[0].data
    assert data["step"] == 4
    assert data["train_loss"] > 0
    ids = [each.id for each in client.fine_tuning.jobs.list(limit=1)]
    assert ids[0] == job.id
    assert ids == sorted(ids, reverse=True)


def test_what_is_learnt_is_said(client: openai.OpenAI, server: ServerProcess) -> None:
    hyper = HYPER | {"n_epochs": 10, "rank": 16}
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyper}}
    job = ended(client, server, create(client, method=method))
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=100))
    losses: list[float] = []
    for event in events:
        data: Any = event.data
        losses += [] if data is None else [data["train_loss"]]
    assert losses[0] < losses[-1] / 3
    assert job.fine_tuned_model is not None
    said = client.chat.completions.create(
        model=job.fine_tuned_model,
        messages=[{"role": "user", "content": "Say it, number 99."}],
        temperature=0,
        max_tokens=20,
    )
    assert said.choices[0].message.content == ANSWER


def test_auto_is_what_a_file_of_its_size_needs(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    hyper = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyper}}
    job = create(client, method=method)
    assert job.hyperparameters.n_epochs == 3
    assert job.hyperparameters.batch_size == 1
    client.fine_tuning.jobs.cancel(job.id)


def test_a_job_is_paused_resumed_and_cancelled(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    hyper = HYPER | {"n_epochs": 500}
    job = create(client, hyperparameters=hyper, method=openai.omit)
    paused = client.fine_tuning.jobs.pause(job.id)
    assert paused.to_dict()["status"] == "paused"
    assert client.fine_tuning.jobs.resume(job.id).status in ("queued", "running")
    cancelled = client.fine_tuning.jobs.cancel(job.id)
    assert cancelled.status == "cancelled"
    assert cancelled.finished_at is not None
    with pytest.raises(openai.ConflictError, match="cancelled"):
        client.fine_tuning.jobs.cancel(job.id)
    deleted = httpx2.delete(f"{server.url}/v1/fine_tuning/jobs/{job.id}")
    assert deleted.json()["deleted"] is True
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.retrieve(job.id)


def test_a_model_is_deleted(client: openai.OpenAI, server: ServerProcess) -> None:
    job = ended(client, server, create(client))
    name = job.fine_tuned_model or ""
    assert client.models.delete(name).deleted
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.NotFoundError):
        client.models.delete(name)


#: REFUSED: lines of a file, and what the refusal says.
REFUSED: dict[str, tuple[list[Any], str]] = {
    "no JSON": ([CHATS[0], "{"], "Line 2 .*JSON"),
    "no assistant": ([{"messages": [{"role": "user", "content": "a"}]}], "Line 1 .*assistant"),
    "weight 0": (
        [{"messages": [*CHATS[0]["messages"][:1], {**CHATS[0]["messages"][1], "weight": 0}]}],
        "Line 1 .*weight",
    ),
    "unknown field": ([{**CHATS[0], "mesages": []}], "Line 1 .*mesages"),
    "unknown role": ([{"messages": [{"role": "boss", "content": "a"}]}], "Line 1"),
    "pairs": ([{"input": {}, "preferred_output": [], "non_preferred_output": []}], "Line 1"),
    "no completion": ([{"prompt": "a"}], "Line 1 .*completion"),
    "empty": ([""], "no example"),
    "too long": (
        [
            {
                "messages": [
                    *CHATS[0]["messages"][:1],
                    {"role": "assistant", "content": "a b " * 5000},
                ]
            }
        ],
        "Line 1 .*tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lines_that_cannot_be_used_are_named(client: openai.OpenAI, name: str) -> None:
    rows, why = REFUSED[name]
    with pytest.raises(openai.BadRequestError, match=why) as refusal:
        create(client, training_file=upload(client, rows))
    assert refusal.value.param == "training_file"
    with pytest.raises(openai.BadRequestError, match=why) as refusal:
        create(client, validation_file=upload(client, rows))
    assert refusal.value.param == "validation_file"


#: WRONG: fields of a job, and the parameter that its refusal names.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no model of its kind": ({"model": "demo:mlm"}, "model"),
    "integrations": (
        {"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]},
        "integrations",
    ),
    "reinforcement": ({"method": {"type": "reinforcement"}}, "method"),
    "unknown method": ({"method": {"type": "magic"}}, "method"),
    "unknown hyper-parameter": (
        {"method": {"type": "supervised", "supervised": {"hyperparameters": {"epochs": 1}}}},
        "method",
    ),
    "suffix": ({"suffix": "a:b"}, "suffix"),
    "rank": (
        {"method": {"type": "supervised", "supervised": {"hyperparameters": {"rank": 1024}}}},
        "hyperparameters.rank",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_fields_that_cannot_be_used_are_named(client: openai.OpenAI, name: str) -> None:
    fields, param = WRONG[name]
    with pytest.raises(openai.BadRequestError) as refusal:
        create(client, **fields)
    assert refusal.value.param == param


def test_files_that_are_not_there_are_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        create(client, training_file="file-none")
    assert refusal.value.param == "training_file"
    file = client.files.create(file=("a.jsonl", b"{}"), purpose="batch").id
    with pytest.raises(openai.BadRequestError, match="purpose") as wrong:
        create(client, training_file=file)
    assert wrong.value.param == "training_file"
