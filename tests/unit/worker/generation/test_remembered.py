"""The memory of loads: which loads take over what, and what is wrong with a file."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.models.checkpoints.contents import SeenFolder
from mlx_parallm.storage.cache_folder import CacheFolder
from mlx_parallm.worker.device.properties import arithmetic
from mlx_parallm.worker.generation.load import remembered
from mlx_parallm.worker.generation.load.plan import DecoderChoices, GenerationSpec
from mlx_parallm.worker.generation.load.proposal_check import ProposalChoice
from mlx_parallm.worker.generation.load.remembered import (
    NO_CHOICE,
    PLANS,
    LoadMemory,
    RememberedPlans,
)

CONTENT = "5" * 64
WEIGHT_BYTES = 1000
CHOICES = DecoderChoices(
    is_cast=True,
    attention="reference",
    kernels={"a kernel is used for (1, 2)": True, "another is used for 3": False},
    path="split",
    head=0,
    samples_by_kernel=False,
    adapts_by_kernel=True,
    why_no_images="rows differ by 0.3",
    proposals=ProposalChoice(batches=True, keeps_states=True),
)
SPEC = GenerationSpec(config=ModelConfig(), path=Path("a"), settings=EngineConfig())


def changed(settings: Any, name: str) -> Any:
    """Return a copy with another value, of a type that the field never has."""
    other = copy.copy(settings)
    object.__setattr__(other, name, "another value")
    return other


def spec_with(part: str, name: str) -> GenerationSpec:
    settings = SPEC.settings
    if part == "ModelConfig":
        return replace(SPEC, config=changed(SPEC.config, name))
    if part == "EngineConfig":
        return replace(SPEC, settings=changed(settings, name))
    field = {"CacheConfig": "cache", "SchedulerConfig": "scheduler"}[part]
    inner = changed(getattr(settings, field), name)
    return replace(SPEC, settings=replace(settings, **{field: inner}))


ALL_FIELDS = [
    (kind.__name__, field.name, field.name in ignored)
    for kind, ignored in NO_CHOICE.items()
    for field in fields(kind)
    if (kind, field.name) not in [(EngineConfig, "cache"), (EngineConfig, "scheduler")]
]


@pytest.mark.parametrize("choices", [CHOICES, DecoderChoices(is_cast=True, attention="cuda")])
def test_what_was_remembered_is_found_by_another_process(
    tmp_path: Path, choices: DecoderChoices
) -> None:
    RememberedPlans(tmp_path).put(SPEC, CONTENT, choices, WEIGHT_BYTES)
    other = replace(SPEC, path=Path("a copy of it"))
    assert RememberedPlans(tmp_path).find(other, CONTENT) == choices
    assert RememberedPlans(None).find(SPEC, CONTENT) is None


@pytest.mark.parametrize(("part", "name", "is_ignored"), ALL_FIELDS)
def test_any_setting_that_is_not_known_to_choose_nothing_is_part_of_the_key(
    tmp_path: Path, part: str, name: str, *, is_ignored: bool
) -> None:
    plans = RememberedPlans(tmp_path)
    plans.put(SPEC, CONTENT, CHOICES, WEIGHT_BYTES)
    choices = plans.find(spec_with(part, name), CONTENT)
    assert choices == (CHOICES if is_ignored else None)


def test_settings_that_choose_nothing_exist() -> None:
    for kind, ignored in NO_CHOICE.items():
        assert ignored <= {field.name for field in fields(kind)}


@pytest.mark.parametrize("part", ["package_versions", "_own_code", "_device"])
def test_other_weights_versions_code_or_devices_are_not_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    plans = RememberedPlans(tmp_path)
    plans.put(SPEC, CONTENT, CHOICES, WEIGHT_BYTES)
    assert plans.find(SPEC, "6" * 64) is None
    monkeypatch.setattr(remembered, part, lambda: {"other": "1"})
    assert plans.find(SPEC, CONTENT) is None


def test_another_device_or_variable_of_mlx_is_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    plans = RememberedPlans(tmp_path)
    plans.put(SPEC, CONTENT, CHOICES, WEIGHT_BYTES)
    monkeypatch.setenv("MLX_PARALLM_KERNEL_CACHE_DIR", str(tmp_path))
    assert plans.find(SPEC, CONTENT) == CHOICES
    with monkeypatch.context() as patch:
        patch.setenv("MLX_ENABLE_TF32", "0")
        assert plans.find(SPEC, CONTENT) is None
    monkeypatch.setattr(remembered.mx, "device_info", lambda: {"device_name": "Apple M7"})
    assert plans.find(SPEC, CONTENT) is None


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"\xff",
        *(
            json.dumps({"choices": asdict(CHOICES) | change, "weight_bytes": 1}).encode()
            for change in (
                {"path": 1},
                {"head": True},
                {"is_cast": None},
                {"attention": None},
                {"kernels": ["a"]},
                {"kernels": {"a": 1}},
                {"proposals": {"batches": 1}},
                {"proposals": {"unknown": True}},
                {"proposals": "all"},
                {"samples_by_kernel": "yes"},
                {"unknown": True},
            )
        ),
        json.dumps({"choices": {"is_cast": True}, "weight_bytes": 1}).encode(),
        json.dumps({"choices": asdict(CHOICES)}).encode(),
        json.dumps({"choices": asdict(CHOICES), "weight_bytes": "many"}).encode(),
    ],
)
def test_a_file_of_another_form_is_not_taken_over(tmp_path: Path, wrong: bytes) -> None:
    plans = RememberedPlans(tmp_path)
    plans.put(SPEC, CONTENT, CHOICES, WEIGHT_BYTES)
    (path,) = tmp_path.iterdir()
    CacheFolder(tmp_path, PLANS).put(path.stem, wrong)
    assert plans.find(SPEC, CONTENT) is None
    plans.put(SPEC, CONTENT, CHOICES, WEIGHT_BYTES)
    assert plans.find(SPEC, CONTENT) == CHOICES


@pytest.mark.parametrize("is_cast", [True, False])
def test_choices_for_a_cast_that_this_load_does_otherwise_are_not_taken_over(
    tmp_path: Path, *, is_cast: bool
) -> None:
    plans = RememberedPlans(tmp_path)
    plans.put(SPEC, CONTENT, replace(CHOICES, is_cast=is_cast), WEIGHT_BYTES)
    room, none = (replace(SPEC, free_bytes=share * WEIGHT_BYTES) for share in (2, 1))
    assert (plans.find(room, CONTENT) is not None) is is_cast
    assert (plans.find(none, CONTENT) is not None) is not is_cast


def test_a_named_dtype_is_not_a_matter_of_memory(tmp_path: Path) -> None:
    spec = replace(SPEC, config=ModelConfig(dtype="float16"))
    choices = replace(CHOICES, is_cast=False)
    RememberedPlans(tmp_path).put(spec, CONTENT, choices, WEIGHT_BYTES)
    assert RememberedPlans(tmp_path).find(replace(spec, free_bytes=1), CONTENT) == choices


def test_a_load_is_remembered_once_the_content_is_known(tmp_path: Path) -> None:
    plans, seen = RememberedPlans(tmp_path), SeenFolder()
    memory = LoadMemory(plans, SPEC, seen)
    assert memory.earlier is None
    memory.note(seen, CHOICES, WEIGHT_BYTES)
    assert list(tmp_path.iterdir()) == []
    assert seen.on_known is not None
    seen.on_known(CONTENT)
    assert plans.find(SPEC, CONTENT) == CHOICES
    later = LoadMemory(plans, SPEC, SeenFolder(digest=CONTENT))
    assert later.earlier is not None
    assert (later.earlier.choices, later.earlier.draft) == (CHOICES, None)


def test_choices_that_were_taken_over_are_not_written_again(tmp_path: Path) -> None:
    plans, seen = RememberedPlans(tmp_path), SeenFolder(digest=CONTENT)
    plans.put(SPEC, CONTENT, CHOICES, WEIGHT_BYTES)
    LoadMemory(plans, SPEC, seen).note(seen, replace(CHOICES, path="other"), WEIGHT_BYTES)
    assert plans.find(SPEC, CONTENT) == CHOICES


def test_packages_without_metadata_have_a_key_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata.Distribution, "discover", lambda **_: iter(()))
    arithmetic.cache_clear()
    plans = RememberedPlans(tmp_path)
    plans.put(SPEC, CONTENT, CHOICES, WEIGHT_BYTES)
    assert plans.find(SPEC, CONTENT) == CHOICES
    arithmetic.cache_clear()
