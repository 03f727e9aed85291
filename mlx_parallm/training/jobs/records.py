"""The records of fine-tuning jobs, and the order of their states.

queued ─▶ running ─▶ succeeded
│         │  ▲  └─▶ failed
│         ▼  │
│        paused                     (by a request, or by the server, with a reason)
└────────┴───────▶ cancelled        (also from running)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

#: ``PREFIX``: what the ids of jobs begin with.
PREFIX = "ftjob-"
#: ``Level``: how bad an event is.
Level = Literal["info", "warn", "error"]


class JobStatus(StrEnum):
    """The state of a job, in OpenAI's words."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        """True if it is final."""
        return self in {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED}


class Method(StrEnum):
    """The source that a job learns from.

    supervised: the assistant's messages of conversations.
    dpo: pairs of answers, of which one is preferred (arXiv:2305.18290).
    reward: the same pairs, for a model that scores texts.
    """

    SUPERVISED = "supervised"
    DPO = "dpo"
    REWARD = "reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobError:
    """Why a job failed."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """The settings of a job.

    Attributes:
        owner: digest of the key whose files it reads and writes.
        model: the first name of the model.
        method: what it learns from.
        hyperparameters: as they were asked for, "auto" replaced; plain JSON.
        training_file: the id of a file.
        validation_file: likewise; None without one.
        suffix: part of the fine-tuned model's name; None without one.
        seed: of the session.
        num_steps: how many steps it makes.
        eval_every: steps between two validations, and checkpoints.
        metadata: kept for the caller.
    """

    owner: str
    model: str
    method: Method
    hyperparameters: Mapping[str, Any]
    training_file: str
    seed: int
    num_steps: int
    eval_every: int
    validation_file: str | None = None
    suffix: str | None = None
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job. Times are Unix seconds.

    Attributes:
        id: unique.
        settings: what was asked for.
        session: the id of its training session.
        created_at: when.
        status: see the class.
        reason: why the server paused it; None if a request did.
        error: why it failed.
        finished_at: when it ended.
        trained_tokens: tokens that were trained on, all epochs together; None before it succeeded.
        fine_tuned_model: the name of the result; None before it succeeded.
        result_step: the step of the checkpoint that the result is; None before it was chosen.
        result_files: ids of files with figures of the steps.
    """

    id: str
    settings: JobSettings
    session: str
    created_at: int
    status: JobStatus = JobStatus.QUEUED
    reason: str | None = None
    error: JobError | None = None
    finished_at: int | None = None
    trained_tokens: int | None = None
    fine_tuned_model: str | None = None
    result_step: int | None = None
    result_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """A line of the events of a job.

    Attributes:
        number: counts them from 0.
        created_at: Unix seconds.
        message: for people.
        level: how bad it is.
        data: numbers of a step; empty for a message.
    """

    number: int
    created_at: int
    message: str
    level: Level = "info"
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A state of a job's adapter.

    Attributes:
        step: how many steps it had made.
        created_at: Unix seconds.
        name: of the served adapter.
        metrics: of its latest step, and of the validation.
        is_served: False once it was deleted, while the result needs its files.
    """

    step: int
    created_at: int
    name: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    is_served: bool = True
