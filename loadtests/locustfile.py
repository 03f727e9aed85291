"""Users that chat, complete and hang up; every complete answer is compared with the right one.

The right answers are those of the server before the load begins, asked one at a time. Run it by
``python -m loadtests.run``, or by locust itself against a server that is already up.
"""

from __future__ import annotations

import json
import random
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from locust import User, constant, events, task
from locust.env import Environment

from loadtests.cases import Case, make_cases
from loadtests.exchange import Answer, WrongAnswerError, ask, ask_and_leave

LONG_OUTPUT_TOKENS = 400


@events.test_start.add_listener
def record_right_answers(environment: Environment, **_: Any) -> None:
    """Request every case on the idle server, and keep the answers for the users."""
    base_url = environment.host or ""
    with urllib.request.urlopen(f"{base_url}/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
    environment.right_answers = [  # type: ignore[attr-defined]
        (case, ask(base_url, case.route, case.body)) for case in make_cases(model)
    ]


class CheckingUser(User):
    """Asks for one case after another and compares."""

    abstract = True
    wait_time = constant(0)
    kind = ""

    def on_start(self) -> None:
        self.draw = random.Random(id(self))
        answers: list[tuple[Case, Answer]] = self.environment.right_answers
        self.cases = [pair for pair in answers if pair[0].name == self.kind]

    @task
    def compare(self) -> None:
        """Request one case and compare the answer."""
        case, right = self.draw.choice(self.cases)
        self.report(case.name, lambda: self._compare(case, right))

    def _compare(self, case: Case, right: Answer) -> int:
        answer = ask(self.host or "", case.route, case.body)
        if answer != right:
            raise WrongAnswerError(f"{answer} is not {right} for {case.body}")
        return len(answer.text)

    def report(self, name: str, exchange: Callable[[], int]) -> None:
        """Run an exchange and report its result to locust."""
        start = time.perf_counter()
        error, length = None, 0
        try:
            length = exchange()
        except (WrongAnswerError, OSError, ValueError) as cause:
            error = cause
            print(f"{name}: {cause!r}", file=sys.stderr)
        self.environment.events.request.fire(
            request_type="POST",
            name=name,
            response_time=1000 * (time.perf_counter() - start),
            response_length=length,
            exception=error,
            context={},
        )


class ChatUser(CheckingUser):
    """Streams chats."""

    kind = "chat"
    weight = 4


class CompletionUser(CheckingUser):
    """Streams completions."""

    kind = "completions"
    weight = 3


class LeavingUser(CheckingUser):
    """Closes the connection in the middle of a long answer."""

    kind = "completions"
    weight = 1

    @task
    def compare(self) -> None:
        """Disconnect after a few events."""
        case, _ = self.draw.choice(self.cases)
        body = case.body | {"max_tokens": LONG_OUTPUT_TOKENS}
        count = self.draw.randint(0, 12)
        self.report("left", lambda: ask_and_leave(self.host or "", case.route, body, count))
