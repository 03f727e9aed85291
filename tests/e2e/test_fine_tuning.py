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
    process = ServerProcess("--model", MODEL, "demo:mlm", "demo:reward")
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=None) as client:
        yield client


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
    assert table[0].split(",")[:3] == ["step", "train_loss", "train_accuracy"]
    assert len(table) == 5


OPENAI_PAIRS = [
    {
        "input": {"messages": [{"role": "user", "content": f"Say it, number {number}."}]},
        "preferred_output": [{"role": "assistant", "content": ANSWER}],
        "non_preferred_output": [{"role": "assistant", "content": f"I say {number}."}],
    }
    for number in range(16)
]
TRL_PAIRS = [
    {"prompt": f"Number {number} is ", "chosen": "joyful", "rejected": "dull and empty"}
    for number in range(16)
]


def by(kind: str, **hyper: Any) -> Any:
    """Return a method with hyper-parameters."""
    return {"type": kind, kind: {"hyperparameters": HYPER | hyper}}


def metrics(client: openai.OpenAI, job: FineTuningJob) -> list[dict[str, Any]]:
    """Return the figures of a job's events, oldest first."""
    events = reversed(list(client.fine_tuning.jobs.list_events(job.id, limit=100)))
    return [dict(event.data) for event in events if isinstance(event.data, dict)]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(OPENAI_PAIRS, id="openai", marks=pytest.mark.slow),
        pytest.param(TRL_PAIRS, id="trl"),
    ],
)
def test_what_is_preferred_becomes_likelier(
    client: openai.OpenAI, server: ServerProcess, rows: list[Any]
) -> None:
    method = by("dpo", n_epochs=3, beta=0.2, learning_rate_multiplier=2000, layers="top:1")
    file = upload(client, rows)
    job = ended(
        client, server, create(client, training_file=file, validation_file=file, method=method)
    )
    assert (job.status, job.error) == ("succeeded", None)
    assert job.method is not None
    assert job.method.dpo is not None
    assert job.method.dpo.hyperparameters is not None
    assert job.method.dpo.hyperparameters.beta == 0.2
    figures = metrics(client, job)
    # Nothing has moved from the reference.
    assert figures[0]["train_loss"] == pytest.approx(0.6931, abs=1e-3)
    validated = [each for each in figures if "valid_loss" in each]
    assert len(validated) == 3
    assert validated[-1]["valid_loss"] < 0.5
    assert validated[-1]["valid_accuracy"] == validated[-1]["train_accuracy"] == 1.0
    assert validated[-1]["train_margin"] > 0
    assert job.fine_tuned_model is not None
    client.completions.create(model=job.fine_tuned_model, prompt="1", max_tokens=2)


@pytest.mark.parametrize("model", ["demo:reward", pytest.param("demo:mlm", marks=pytest.mark.slow)])
def test_scores_learn_what_is_preferred(
    client: openai.OpenAI, server: ServerProcess, model: str
) -> None:
    """Train the score of a model, or a new one of a model without."""
    rows = [row | {"margin": 0.5} for row in TRL_PAIRS]
    method = by("reward", n_epochs=4, learning_rate_multiplier=100, layers="top:1")
    file = upload(client, rows)
    fields: Any = {"training_file": file, "validation_file": file, "method": method}
    job = create(client, model=model, **fields)
    # The session has what it learns.
    client.files.delete(file)
    job = ended(client, server, job)
    assert (job.status, job.error) == ("succeeded", None)
    figures = metrics(client, job)
    assert figures[-1]["valid_accuracy"] == 1.0
    assert figures[-1]["valid_loss"] < figures[0]["train_loss"]

    def rewards(name: str | None) -> list[float]:
        texts = ["Number 99 is joyful", "Number 99 is dull and empty"]
        answer = httpx2.post(
            f"{server.url}/v1/rewards/score", json={"model": name, "texts": texts}, timeout=None
        )
        return [each["reward"] for each in answer.json()["data"]]

    chosen, rejected = rewards(job.fine_tuned_model)
    before = rewards(model) if model == "demo:reward" else [0.0, 0.0]
    assert chosen - rejected > before[0] - before[1]
    body = {"model": job.fine_tuned_model, "input": ["Number 99 is joyful"]}
    classified = httpx2.post(f"{server.url}/v1/classifications", json=body, timeout=None)
    assert classified.status_code == 200, classified.text


def test_beta_is_chosen_by_auto(client: openai.OpenAI) -> None:
    file = upload(client, OPENAI_PAIRS)
    job = create(client, training_file=file, method=by("dpo", beta="auto", n_epochs=500))
    client.fine_tuning.jobs.cancel(job.id)
    assert job.to_dict()["method"]["dpo"]["hyperparameters"]["beta"] == 0.1  # type: ignore[index]


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
    # It is cancelled long before its end.
    method = {"type": "supervised", "supervised": {"hyperparameters": HYPER | {"n_epochs": 500}}}
    own = create(client, method=method, metadata={"kind": "own", "more": ""})
    client.fine_tuning.jobs.cancel(own.id)
    for metadata in ({"kind": "own"}, {"kind": "own", "more": ""}):
        listed = client.fine_tuning.jobs.list(metadata=metadata)
        assert [each.id for each in listed] == [own.id]
    without = client.fine_tuning.jobs.list(extra_query={"metadata": "null"}).data
    assert job.id in {each.id for each in without}
    assert own.id not in {each.id for each in without}
    client.delete(f"/fine_tuning/jobs/{own.id}", cast_to=object)
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
    "pairs": (OPENAI_PAIRS, "Line 1"),
    "empty completion": ([{"prompt": "a", "completion": ""}], "Line 1 .*empty"),
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


TURN = {"role": "user", "content": "a"}
#: BAD_PAIRS: lines of a file of pairs, and what the refusal says.
BAD_PAIRS: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "JSON"),
    "no pair": (CHATS[0], "messages"),
    "one text": ({"prompt": "a", "chosen": "b"}, "both"),
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "equal"),
    "equal outputs": (
        OPENAI_PAIRS[0] | {"non_preferred_output": OPENAI_PAIRS[0]["preferred_output"]},
        "equal",
    ),
    "empty": ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected cannot be empty"),
    "empty message": (
        OPENAI_PAIRS[0] | {"preferred_output": [{"role": "assistant", "content": ""}]},
        "chosen cannot be empty",
    ),
    "no output": (OPENAI_PAIRS[0] | {"preferred_output": []}, "preferred_output"),
    "no assistant": (OPENAI_PAIRS[0] | {"preferred_output": [TURN]}, "assistant"),
    "unknown role": (
        OPENAI_PAIRS[0] | {"input": {"messages": [TURN | {"role": "boss"}]}},
        "boss",
    ),
    "both forms": (OPENAI_PAIRS[0] | {"chosen": "a"}, "chosen and rejected, or"),
    "too long": ({"prompt": "One, two, ", "chosen": "a b " * 5000, "rejected": "c"}, "tokens"),
    "margin": ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"}, "margin"),
    "unknown field": (TRL_PAIRS[0] | {"prompts": "a"}, "prompts"),
}


@pytest.mark.parametrize("model", [MODEL, "demo:reward"])
@pytest.mark.parametrize("name", BAD_PAIRS)
def test_pairs_that_cannot_be_used_are_named(client: openai.OpenAI, name: str, model: str) -> None:
    line, why = BAD_PAIRS[name]
    method = by("dpo" if model == MODEL else "reward")
    file = upload(client, [TRL_PAIRS[0], "", line])
    with pytest.raises(openai.BadRequestError, match=f"Line 3 of the file: .*{why}") as refusal:
        create(client, model=model, training_file=file, method=method)
    assert refusal.value.param == "training_file"


#: PAIRS stands for a file of pairs.
PAIRS = "pairs"
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
    "no beta": ({"method": by("supervised", beta=0.1)}, "method"),
    "no beta of scores": ({"model": "demo:reward", "method": by("reward", beta=0.1)}, "method"),
    "beta of 0": ({"method": by("dpo", beta=0)}, "method"),
    "dpo of a masked LM": ({"model": "demo:mlm", "method": by("dpo")}, "model"),
    "dpo of scores": ({"model": "demo:reward", "method": by("dpo")}, "model"),
    "reward of a generator": ({"method": by("reward")}, "model"),
    "another method": ({"method": {"type": "dpo"} | by("reward") | {"type": "dpo"}}, "method"),
    "outside of the method": (
        {"method": {"type": "dpo"}, "hyperparameters": HYPER},
        "hyperparameters",
    ),
    "suffix": ({"suffix": "a:b"}, "suffix"),
    "twice": ({"method": by("supervised"), "hyperparameters": HYPER}, "hyperparameters"),
    "eval_every": ({"method": by("supervised", eval_every=1_000_000_000)}, "method"),
    "rank": ({"method": by("supervised", rank=1024)}, "method.supervised.hyperparameters.rank"),
    "targets": (
        {"method": by("supervised", targets=["nothing"])},
        "method.supervised.hyperparameters.targets",
    ),
    "layers": (
        {"method": by("supervised", layers=[99])},
        "method.supervised.hyperparameters.layer",
    ),
    "layers of pairs": (
        {"model": "demo:reward", "method": by("reward", layers="top:99"), "training_file": PAIRS},
        "method.reward.hyperparameters.layers",
    ),
    **{
        f"old {field}": (
            {"method": openai.omit, "hyperparameters": HYPER | {field: value}},
            f"hyperparameters.{field}",
        )
        for field, value in {"rank": 1024, "targets": ["nothing"], "layers": "top:99"}.items()
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_fields_that_cannot_be_used_are_named(client: openai.OpenAI, name: str) -> None:
    fields, param = WRONG[name]
    if fields.get("training_file") == PAIRS:
        fields = fields | {"training_file": upload(client, TRL_PAIRS)}
    with pytest.raises(openai.BadRequestError) as refusal:
        create(client, **fields)
    assert refusal.value.param is not None
    assert refusal.value.param.startswith(param)
    assert "trainable" not in refusal.value.message


def test_files_that_are_not_there_are_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        create(client, training_file="file-none")
    assert refusal.value.param == "training_file"
    file = client.files.create(file=("a.jsonl", b"{}"), purpose="batch").id
    with pytest.raises(openai.BadRequestError, match="purpose") as wrong:
        create(client, training_file=file)
    assert wrong.value.param == "training_file"
