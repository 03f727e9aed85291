"""A generator that is loaded stage by stage is the one that is loaded at once."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.engine.kind import BuildContext, ModelFolder
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.build import GenerationBuilder
from mlx_parallm.generation.kv_cache.budget import KVShare
from mlx_parallm.generation.pending import READ_SHARE, PendingGenerationModel
from mlx_parallm.generation.tokenizers import read_tokenizers
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.worker.layers.row_layers import row_products
from mlx_parallm.worker.weights.loader import load_model, open_model, parameters_of
from mlx_parallm.worker.worker import Worker

NUM_BLOCKS = 64
FOLDER = ModelFolder(ModelConfig(path=str(DEMO_FOLDER), served_names=("demo",)), DEMO_FOLDER)


def pending_model() -> PendingGenerationModel:
    worker, families, builder = Worker(), MetricFamilies(), GenerationBuilder()
    builder.declare(families)
    builder.install(worker)
    settings = EngineConfig(models=(FOLDER.config,), cache=CacheConfig(), warm_up=False)
    context = BuildContext(settings, families, worker, ignore_progress)
    return PendingGenerationModel(FOLDER, read_tokenizers(FOLDER), context)


def test_a_load_by_stages_is_the_load_at_once() -> None:
    staged, whole = pending_model(), pending_model()
    # It waits for KV at the share that reading takes.
    while staged.advance() < READ_SHARE:
        pass
    share = KVShare(staged.name, staged.read().kv, NUM_BLOCKS)
    staged.allocate(share)
    while staged.advance() < 1:
        pass
    whole.read()
    whole.allocate(share)
    by_stages, at_once = (each.finish().model for each in (staged, whole))
    assert by_stages.info == at_once.info


def test_layers_are_merged_when_their_weights_are_read() -> None:
    opened, whole = open_model(FOLDER.config, FOLDER.path), load_model(FOLDER.config, FOLDER.path)
    model, loaded = opened.loaded.model, whole.model
    mx.synchronize()
    before = mx.get_active_memory()
    products = row_products(model, None)
    merged = replace(opened, products=products)
    parts = list(merged.parts())
    assert mx.get_active_memory() == before
    for number, evaluate in enumerate(parts, 1):
        settled = sum(bool(product.arrays) for product in products)
        assert settled < len(products) or number > 1
        evaluate()
    assert all(product.arrays for product in products)
    expected = parameters_of(loaded)
    assert all(mx.array_equal(own, expected[name]) for name, own in parameters_of(model).items())
    tokens = mx.arange(8).reshape(8, 1)
    assert mx.allclose(model(tokens), loaded(tokens), atol=1e-4)
