"""Tests of the model of random weights that takes images."""

import json

from benchmarks.check_vision import TIE, Answer, is_equal
from benchmarks.make_vision_model import make_vision_model
from mlx_parallm.config import ModelConfig
from mlx_parallm.models.vision.checkpoint import TOWER
from mlx_parallm.worker.weights.loader import load_model, parameters_of


def test_both_folders_have_the_same_text_model_and_one_has_a_tower(tmp_path):
    whole, text = make_vision_model(tmp_path, "tiny")
    # mlx-vlm reads the text model's fields beside the others only.
    assert json.loads((whole / "config.json").read_text())["num_hidden_layers"] == 3
    seeing, blind = (load_model(ModelConfig(), folder).model for folder in (whole, text))
    assert hasattr(seeing, TOWER)
    assert not hasattr(blind, TOWER)
    names = [name for name in parameters_of(seeing) if not name.startswith(TOWER)]
    assert names == list(parameters_of(blind))
    assert make_vision_model(tmp_path, "tiny") == (whole, text)


def test_answers_are_equal_up_to_a_near_tie():
    own = Answer([1], [5, 6, 7], [1.0, TIE / 2, 1.0])
    assert is_equal(own, [5, 6, 7])
    assert is_equal(own, [5, 8, 9])
    assert not is_equal(own, [4, 6, 7])
    assert not is_equal(own, [5, 6])
    assert not is_equal(own, [5, 6, 8])
