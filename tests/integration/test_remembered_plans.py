"""A later load of an equal model takes over what an earlier one chose, and computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SpeculativeConfig
from mlx_parallm.engine.kind import BuildContext, BuiltModel, ModelFolder
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.build import GenerationBuilder
from mlx_parallm.generation.kind import read_tokenizers
from mlx_parallm.generation.kv_cache.budget import KVShare
from mlx_parallm.generation.pending import PendingGenerationModel
from mlx_parallm.kernels.store import FOLDER_VARIABLE
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.worker.generation import row_selection
from mlx_parallm.worker.generation.load import path_choice, proposal_check, remembered
from mlx_parallm.worker.worker import Worker
from tests.fake_ranks import fake_ranks
from tests.hub_cache import hub_copy
from tests.hybrid_folder import write_hybrid

NUM_BLOCKS = 64
CHECKS = ((path_choice, "check_path"), (row_selection, "_works"), (proposal_check, "_Check"))
NGRAMS = SpeculativeConfig(method="ngram")


@pytest.fixture(name="checks")
def checks_fixture(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the checks that loads ran so far."""
    checks: list[str] = []
    for module, name in CHECKS:
        own = getattr(module, name)

        def counted(*args: Any, own: Any = own, name: str = name) -> Any:
            checks.append(name)
            return own(*args)

        monkeypatch.setattr(module, name, counted)
    return checks


def qwen(folder: Path) -> Path:
    return write_hybrid(folder, "qwen3")


def begun(
    folder: Path,
    plans: Path | None,
    settings: EngineConfig | None = None,
    ranks: Any = None,
    **model: Any,
) -> PendingGenerationModel:
    worker, families, builder = Worker(), MetricFamilies(), GenerationBuilder()
    builder.declare(families)
    builder.install(worker)
    # The loader keeps to itself: what is tried is which choices a load over ranks gets.
    worker.ranks = ranks
    config = ModelConfig(path=str(folder), served_names=("model",), **model)
    settings = replace(
        settings or EngineConfig(),
        models=(config,),
        warm_up=False,
        kernel_cache_dir="none" if plans is None else str(plans),
    )
    context = BuildContext(settings, families, worker, ignore_progress)
    opened = ModelFolder(config, folder)
    return PendingGenerationModel(opened, read_tokenizers(opened), context)


def finished(pending: PendingGenerationModel) -> BuiltModel:
    share = KVShare(pending.name, pending.read().kv, NUM_BLOCKS)
    pending.allocate(share)
    return pending.finish()


def load(folder: Path, plans: Path | None, *args: Any, **model: Any) -> BuiltModel:
    return finished(begun(folder, plans, *args, **model))


@pytest.mark.parametrize(
    ("write", "settings"),
    [(qwen, EngineConfig()), (write_hybrid, EngineConfig(speculative=NGRAMS))],
)
def test_a_later_load_of_a_copy_checks_nothing(
    tmp_path: Path,
    checks: list[str],
    write: Callable[[Path], Path],
    settings: EngineConfig,
) -> None:
    folder, plans = write(tmp_path / "model"), tmp_path / "plans"
    first = load(hub_copy(folder, tmp_path / "first"), plans, settings)
    expected = {name for _, name in CHECKS}
    assert set(checks) == (expected if settings.speculative else expected - {"_Check"})
    checks.clear()
    later = load(hub_copy(folder, tmp_path / "later"), plans, settings)
    assert checks == []
    assert later.model.info == first.model.info


def with_changed_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    name = min(weights)
    weights[name] = weights[name] * 1.5
    mx.save_safetensors(str(path), weights, {"format": "mlx"})


def with_changed_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))


@pytest.mark.parametrize("change", [with_changed_weight, with_changed_config])
def test_other_weights_and_another_config_are_checked_anew(
    tmp_path: Path, checks: list[str], change: Callable[[Path], None]
) -> None:
    folder, plans = qwen(tmp_path / "model"), tmp_path / "plans"
    load(hub_copy(folder, tmp_path / "first"), plans)
    change(folder)
    checks.clear()
    load(hub_copy(folder, tmp_path / "later"), plans)
    assert checks
    assert len(list(plans.iterdir())) == 2


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        (EngineConfig(cache=CacheConfig(block_size=32)), {}),
        (EngineConfig(), {"dtype": "float16"}),
        (EngineConfig(), {"kv_cache_dtype": "int8"}),
    ],
)
def test_other_settings_are_checked_anew(
    tmp_path: Path, checks: list[str], settings: EngineConfig, model: dict[str, Any]
) -> None:
    folder = hub_copy(qwen(tmp_path / "model"), tmp_path / "hub")
    load(folder, tmp_path / "plans")
    checks.clear()
    load(folder, tmp_path / "plans", settings, **model)
    assert checks
    checks.clear()
    load(folder, tmp_path / "plans", settings, **model)
    assert checks == []


def test_another_version_of_mlx_and_a_damaged_file_are_checked_anew(
    tmp_path: Path, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plans = hub_copy(qwen(tmp_path / "model"), tmp_path / "hub"), tmp_path / "plans"
    load(folder, plans)
    (file,) = plans.iterdir()
    checks.clear()
    with monkeypatch.context() as patch:
        patch.setattr(remembered, "package_versions", lambda: {"mlx": "9.9"})
        load(folder, plans)
    assert checks
    for damaged in (b"", file.read_bytes()[:-1], file.read_bytes().replace(b"packed", b"pocked")):
        file.write_bytes(damaged)
        checks.clear()
        load(folder, plans)
        assert checks
        checks.clear()
        load(folder, plans)
        assert checks == []


def test_a_folder_that_must_be_hashed_is_remembered_after_that(
    tmp_path: Path, checks: list[str]
) -> None:
    folder, plans = qwen(tmp_path / "model"), tmp_path / "plans"
    first = load(folder, plans)
    assert not plans.exists()
    assert first.engine is not None
    assert first.engine.live is not None
    first.engine.live.begin_hashing()
    first.engine.live.contents.join()
    checks.clear()
    load(hub_copy(folder, tmp_path / "copy"), plans)
    assert checks == []


def test_a_folder_that_changes_while_it_is_read_is_not_remembered(tmp_path: Path) -> None:
    folder, plans = hub_copy(qwen(tmp_path / "model"), tmp_path / "hub"), tmp_path / "plans"
    pending = begun(folder, plans)
    config = (folder / "config.json").resolve()
    config.write_text(config.read_text() + " ")
    built = finished(pending)
    assert built.engine is not None
    assert built.engine.live is not None
    built.engine.live.begin_hashing()
    built.engine.live.contents.join()
    assert not plans.exists()


def test_a_model_and_its_draft_model_are_remembered_each(tmp_path: Path, checks: list[str]) -> None:
    folder = hub_copy(qwen(tmp_path / "model"), tmp_path / "hub")
    plans = tmp_path / "plans"
    speculative = SpeculativeConfig(method="draft_model", model=str(folder))
    first = load(folder, plans, EngineConfig(speculative=speculative))
    checks.clear()
    later = load(folder, plans, EngineConfig(speculative=speculative))
    assert checks == []
    assert later.model.info == first.model.info


def test_a_load_over_ranks_takes_nothing_over(tmp_path: Path, checks: list[str]) -> None:
    folder = hub_copy(qwen(tmp_path / "model"), tmp_path / "hub")
    load(folder, tmp_path / "plans")
    checks.clear()
    finished(begun(folder, tmp_path / "plans", ranks=fake_ranks(2)[0]))
    assert checks


def test_nothing_is_kept_if_the_setting_says_so(
    tmp_path: Path, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = hub_copy(qwen(tmp_path / "model"), tmp_path / "hub")
    for _ in range(2):
        checks.clear()
        load(folder, None)
        assert checks
    assert not (tmp_path / "cache").exists()


def answers(folder: Path) -> list[Any]:
    """Return greedy and drawn tokens with their log-probabilities, of prompts in one batch."""
    prompts = [f"{number} texts of bytes, {'each ' * number}longer" for number in range(5)]
    greedy = SamplingParams(max_tokens=12, temperature=0, logprobs=2, ignore_eos=True)
    drawn = SamplingParams(max_tokens=12, temperature=1, seed=3, ignore_eos=True)
    with LLM(str(folder)) as llm:
        outputs = [*llm.generate(prompts, greedy), *llm.generate(prompts, drawn)]
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize("write", [qwen, write_hybrid])
def test_tokens_and_log_probabilities_are_those_of_the_first_load(
    tmp_path: Path,
    checks: list[str],
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path], Path],
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "plans"))
    folder = hub_copy(write(tmp_path / "model"), tmp_path / "hub")
    first = answers(folder)
    assert checks
    checks.clear()
    assert answers(folder) == first
    assert checks == []


def test_a_model_that_is_unloaded_at_once_is_remembered_too(
    tmp_path: Path, checks: list[str]
) -> None:
    folder, plans = qwen(tmp_path / "model"), tmp_path / "plans"
    first = load(folder, plans)
    assert first.engine is not None
    assert first.engine.live is not None
    first.engine.live.begin_hashing()
    first.engine.release()
    first.engine.live.contents.join()
    checks.clear()
    load(hub_copy(folder, tmp_path / "copy"), plans)
    assert checks == []
