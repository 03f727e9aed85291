"""A model that does not compute images as the stock model does serves texts only."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from mlx_parallm.config import CacheConfig, SchedulerConfig
from mlx_parallm.types.model_input import InputKind
from mlx_parallm.worker.attention.base import AttentionBackend
from mlx_parallm.worker.attention.quantisation import quantisation_of
from mlx_parallm.worker.attention.quantised_reference import QuantisedReferenceAttention
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.inputs import forward
from mlx_parallm.worker.generation.inputs.forward import DeepstackSeam
from mlx_parallm.worker.generation.load import image_check, path_choice
from mlx_parallm.worker.generation.load.image_check import ImageText
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.path_choice import ALONE
from mlx_parallm.worker.generation.load.plan import DecoderChoices
from mlx_parallm.worker.generation.load.runner import make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.ops import at_once
from tests.golden_images import vision_names
from tests.image_mutations import (
    LOADED_MUTATIONS,
    TWO_WAY,
    Mutation,
    causal_spans,
    no_features,
    other_images,
)
from tests.image_sessions import MAX_LEN, loaded_of
from tests.integration.test_parity_generate import BLOCK_SIZE, loaded_model


def load(
    name: str,
    attention: AttentionBackend | None = None,
    choices: DecoderChoices | None = None,
) -> ModelRunner:
    return load_with_choices(name, attention, choices)[0]


def load_with_choices(
    name: str,
    attention: AttentionBackend | None = None,
    choices: DecoderChoices | None = None,
) -> tuple[ModelRunner, DecoderChoices]:
    loaded = loaded_of(name) if name in vision_names() else loaded_model(name)
    layouts, config = probe_layout(loaded.model), CacheConfig(block_size=BLOCK_SIZE)
    attention = attention or ReferenceAttention(BLOCK_SIZE)
    scheduler = SchedulerConfig(max_num_seqs=4)
    plan = plan_kv(layouts, loaded.config, config, scheduler, MAX_LEN, attention)
    return at_once(make_runner)(loaded, layouts, plan, 64, attention, choices=choices)


#: ``MISTAKES``: those with all rows show in any model, and are tried in one of each path.
MISTAKES = [
    (name, mutation)
    for name, mutation in LOADED_MUTATIONS
    if mutation not in (no_features, other_images) or name in ("llava", "gemma3", "qwen3_5")
]


def takes_images(runner: ModelRunner) -> bool:
    return InputKind.IMAGE in runner.info.input_kinds


@pytest.mark.parametrize(("name", "mutation"), MISTAKES)
def test_a_mistake_with_rows_of_images_is_found_at_load(
    name: str,
    mutation: Mutation,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mutation(monkeypatch)
    runner, choices = load_with_choices(name)
    assert not takes_images(runner)
    assert runner.info.path in {"packed", "split"}, "texts are computed as before"
    (warning,) = [each for each in caplog.messages if "takes no images" in each]
    assert "differ from mlx_lm's by" in warning
    # A worker that takes the choices over refuses images too, for the same reason.
    caplog.clear()
    assert not takes_images(load(name, choices=choices))
    assert warning in caplog.messages


@pytest.mark.parametrize("name", TWO_WAY)
def test_the_check_shows_cut_spans(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageText, "end", lambda self, start, stop, **_: stop)
    assert not takes_images(load(name))


def test_images_are_refused_on_a_path_that_does_not_compute_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such layer")

    monkeypatch.setattr(DeepstackSeam, "during", fail)
    assert not takes_images(load("qwen3_vl"))
    assert "mlx_lm's model does not compute them: ValueError: no such layer" in caplog.text


def test_images_are_refused_where_rope_has_one_axis(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forward, "find_rotary", lambda *_: None)
    assert not takes_images(load("qwen2_vl"))
    (warning,) = [each for each in caplog.messages if "takes no images" in each]
    assert "mrope_section" in warning


def test_a_model_without_a_tower_is_not_checked_with_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image_check, "image_texts", None)
    assert load("llama").info.path == "packed"


def test_the_check_is_done_with_exact_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = quantisation_of("int4")
    assert scheme is not None
    attention = QuantisedReferenceAttention(BLOCK_SIZE, scheme)
    for name in ("gemma3", "qwen3_5"):
        assert takes_images(load(name, attention))
    causal_spans(monkeypatch)
    assert not takes_images(load("gemma3", attention))


def test_rows_on_several_axes_do_not_run_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> Generator[None, None, tuple[None, None, bool]]:
        yield
        return None, None, False

    monkeypatch.setattr(path_choice, "check_path", none)
    for name in ("llava", "qwen2_vl"):
        runner, choices = load_with_choices(name)
        assert choices.path == ALONE
        assert takes_images(runner) == (name == "llava")
    assert "takes no images" in caplog.text
