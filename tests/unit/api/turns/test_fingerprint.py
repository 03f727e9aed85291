"""Changes of a model's revision, and of a server's fingerprint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_parallm.api.turns.samples import system_fingerprint
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.types.request import WeightsVersion
from mlx_parallm.worker.weights.revision import folder_revision
from tests.fake_engine import FakeEngine
from tests.fakes import make_info


def write_model(folder: Path, weights: bytes = b"\1" * 200_000) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_copy_has_the_same_revision(tmp_path: Path) -> None:
    first, other = (write_model(tmp_path / name) for name in "ab")
    assert folder_revision(first) == folder_revision(other)


@pytest.mark.parametrize("weights", [b"\2" * 200_000, b"\1" * 200_001, b"\1" * 10, b""])
def test_other_weights_have_another(tmp_path: Path, weights: bytes) -> None:
    first, other = write_model(tmp_path / "a"), write_model(tmp_path / "b", weights)
    assert folder_revision(first) != folder_revision(other)


def test_another_configuration_has_another(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a")
    before = folder_revision(folder)
    (folder / "config.json").write_text('{"rope_theta": 1}')
    assert folder_revision(folder) != before


def test_the_fingerprint_changes_with_what_changes_results() -> None:
    engine = FakeEngine()
    model = GENERATION.client(engine).first_model()
    known = [system_fingerprint(engine, model)]
    assert known[0] == system_fingerprint(FakeEngine(), model)
    for other in (
        replace(model, revision="another"),
        replace(model, info=make_info(dtype="bfloat16")),
        replace(model, info=make_info(kv_cache_dtype="int8")),
        replace(model, chat_template_kwargs={"enable_thinking": False}),
    ):
        known.append(system_fingerprint(engine, other))
    engine.control.weights = WeightsVersion("update-1", "step-1")
    known.append(system_fingerprint(engine, model))
    # Updates of two servers are distinguished by what their clients call them.
    engine.control.weights = WeightsVersion("update-1", "step-2")
    known.append(system_fingerprint(engine, model))
    assert len(set(known)) == len(known)
