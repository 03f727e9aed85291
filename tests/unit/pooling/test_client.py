"""Which pooling model serves a route if the request names none."""

from __future__ import annotations

import pytest

from mlx_parallm.types.pooling import Task
from tests.fake_encoders import FakeEncoders, make_encoder

MODELS = (
    make_encoder("reward", tasks=("classify", "embed", "token_embed"), is_reward=True),
    make_encoder("masked-lm", tasks=("mlm", "sparse", "embed")),
    make_encoder("embedder", tasks=("embed", "token_embed")),
    make_encoder("second", tasks=("embed", "token_embed")),
)


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("embed", "embedder"),
        ("token_embed", "embedder"),
        ("classify", "reward"),
        ("mlm", "masked-lm"),
        ("sparse", "masked-lm"),
    ],
)
def test_the_first_model_made_most_for_the_task(task: Task, name: str) -> None:
    assert FakeEncoders(*MODELS).get(None, task).names == (name,)


def test_a_model_made_for_something_else_if_no_other_is_served() -> None:
    assert FakeEncoders(*MODELS[:2]).get(None, "embed").names == ("reward",)
    assert FakeEncoders(MODELS[1]).get(None, "embed").names == ("masked-lm",)
