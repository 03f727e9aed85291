"""The two result files of a batch: answers, and lines that failed or were not answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.batch_jobs import answers
from mlx_parallm.batch_jobs.answers import Usage
from mlx_parallm.batch_jobs.files import Upload
from mlx_parallm.batch_jobs.journal import index_of
from mlx_parallm.batch_jobs.lines import custom_id_of, numbered_lines, read_object


@dataclass(frozen=True, slots=True)
class Reason:
    """The error of lines without an answer."""

    code: str
    message: str


EXPIRED = Reason("batch_expired", "The batch's time was over before this request was answered.")
CANCELLED = Reason("batch_cancelled", "The batch was cancelled before this request was answered.")


@dataclass(slots=True)
class Tally:
    """Counts of the two files' lines; failed lines include ``num_unanswered``."""

    completed: int = 0
    failed: int = 0
    num_unanswered: int = 0
    usage: Usage = field(default_factory=Usage)


def write_results(
    source: Path, journal: Path, output: Upload, errors: Upload, reason: Reason
) -> Tally:
    """Write every line of the source into one of the files, in the order of the source.

    Args:
        source: the batch's input.
        journal: the journal with its answers.
        output: the file for answers of status 200.
        errors: the file for all other answers, and for lines without an answer.
        reason: the error of lines without an answer.

    Raises:
        OSError, StorageError: a file could not be read or written.
    """
    tally = Tally()
    for answer, was_answered in _answers(source, journal, reason):
        is_failed = answers.is_failed(answer)
        data = answers.encode(answer)
        upload = errors if is_failed else output
        upload.claim(len(data))
        upload.write(data)
        tally.failed += is_failed
        tally.completed += not is_failed
        tally.num_unanswered += not was_answered
        tally.usage.add(answer)
    return tally


def _answers(source: Path, journal: Path, reason: Reason) -> Iterator[tuple[dict[str, Any], bool]]:
    places = index_of(journal)
    with journal.open("rb") as entries:
        for number, raw in numbered_lines(source):
            place = places.get(number)
            if place is not None:
                entries.seek(place)
                yield json.loads(entries.readline())["answer"], True
            else:
                custom_id = custom_id_of(read_object(number, raw))
                name = answers.new_answer_id()
                yield answers.refused(name, custom_id, reason.code, reason.message), False
