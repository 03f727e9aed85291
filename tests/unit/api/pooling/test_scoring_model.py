"""Which model ranks documents where a request names none."""

from __future__ import annotations

import itertools

import pytest

from mlx_parallm.api.pooling.scores.pairs import scoring_model
from mlx_parallm.types.errors import InvalidRequestError
from tests.fake_encoders import FakeEncoders, make_encoder

# The one that was made most for ranking comes first.
MODELS = [
    make_encoder("cross-encoder", tasks=("classify",), labels=("score",)),
    make_encoder("colbert", tasks=("token_embed", "embed")),
    make_encoder("embedder", tasks=("embed", "token_embed")),
    make_encoder("reward", tasks=("classify",), labels=("reward",), is_reward=True),
    make_encoder("masked-lm", tasks=("mlm", "embed")),
]
UNABLE = make_encoder("classifier", tasks=("classify",), labels=("good", "bad"))


@pytest.mark.parametrize("num_served", [1, 2, 3, 4, 5])
def test_the_model_made_for_ranking_comes_first(num_served: int) -> None:
    served = MODELS[-num_served:]
    for models in itertools.permutations(served):
        chosen = scoring_model(FakeEncoders(UNABLE, *models), None)
        assert chosen.names == served[0].names


def test_the_first_of_equals_and_of_a_name() -> None:
    second = make_encoder("second", tasks=("classify",), labels=("score",))
    encoders = FakeEncoders(MODELS[3], second, *MODELS)
    assert scoring_model(encoders, None).names == ("second",)
    assert scoring_model(encoders, "reward").names == ("reward",)


def test_without_a_model_that_scores() -> None:
    with pytest.raises(InvalidRequestError, match="No model that can score pairs"):
        scoring_model(FakeEncoders(UNABLE), None)
