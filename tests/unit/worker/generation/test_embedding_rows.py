"""The token ids that a model knows are found in every architecture."""

from __future__ import annotations

from benchmarks.architectures import names
from mlx_parallm.worker.generation.row_selection import embedding_rows
from tests.builders.architectures.configs import config_of, decoder_of


def test_every_architecture_has_its_embedding_found() -> None:
    num_found = 0
    for name in names():
        config = config_of(name)
        try:
            model = decoder_of(config)
        # A package is missing, or the architecture wraps one that its configuration must name.
        except (ImportError, SystemExit, TypeError, ValueError):
            continue
        rows = embedding_rows(model, config["vocab_size"])
        assert rows is not None, name
        assert rows >= config["vocab_size"], name
        num_found += 1
    assert num_found > 120
