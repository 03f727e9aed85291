"""Routes that every HTTP process answers, and those of the server's first process."""

from __future__ import annotations

from mlx_parallm.api.app import (
    SLICES,
    STORING_SLICES,
    answers_in_any_process,
    routes_of,
)


def test_each_route_has_its_place() -> None:
    answers = answers_in_any_process()
    for route in routes_of(SLICES + STORING_SLICES):
        for path in route.paths:
            literal = path.replace("{", "").replace("}", "").replace(":path", "")
            for method in route.methods:
                # A path of another slice may fit the pattern of a model's name.
                assert answers(method, literal) == route.facts.in_any_process, (method, literal)


def test_what_no_route_answers_belongs_to_the_first_process() -> None:
    answers = answers_in_any_process()
    assert answers("POST", "/v1/chat/completions")
    assert not answers("GET", "/v1/chat/completions")
    assert not answers("OPTIONS", "/v1/chat/completions")
    assert not answers("POST", "/models/load")
    assert answers("POST", "/models/some/model")
    assert not answers("", "")
