"""The kind of pooling models, as the event loop knows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.kind import Kind, MemoryLimit, ModelFolder, OpenModel
from mlx_parallm.engine.status import RequestDoor
from mlx_parallm.models.checkpoints.encoders import is_encoder
from mlx_parallm.models.checkpoints.model_task import task_of
from mlx_parallm.models.checkpoints.sentence_transformers import transformer_folder
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.pooling.client import PoolingClient
from mlx_parallm.pooling.model import POOLING_TRAITS
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer, load_encoder_tokenizer
from mlx_parallm.tokenizer.template_form import log_losses

if TYPE_CHECKING:
    from mlx_parallm.engine.metrics import MetricFamilies
    from mlx_parallm.pooling.pending import PendingPoolingModel
    from mlx_parallm.worker.worker import Worker


def is_read(config: ModelConfig, path: Path) -> bool:
    """True if a folder has a pooling model.

    Raises:
        ModelLoadError: a file of it cannot be read.
    """
    with load_failures(path):
        return is_encoder(transformer_folder(path)) or task_of(config, path) != "generate"


class PoolingKind(Kind[PoolingClient]):
    """The kind of pooling models."""

    traits = POOLING_TRAITS

    @override
    def client(self, door: RequestDoor) -> PoolingClient:
        return PoolingClient(door)

    @override
    def memory_limit(self, settings: EngineConfig) -> MemoryLimit | None:
        max_bytes = settings.loading.max_encoder_bytes
        if max_bytes is None:
            return None
        return MemoryLimit(max_bytes, "Pooling models", "--pooling-memory-bytes")

    @override
    def serves(self, config: ModelConfig, path: Path) -> bool:
        return is_read(config, path)

    def read(self, config: ModelConfig, path: Path, settings: EngineConfig) -> OpenModel:
        """Read the tokenizer; see ``Kind``."""
        tokenizer = tokenizer_of(config, path)
        (name, *_) = config.served_names or (path.name,)
        log_losses(name, tokenizer.probe_template())
        return OpenPooling(ModelFolder(config, path), settings, tokenizer)


#: ``POOLING``: the kind, whose ``client`` routes use.
POOLING = PoolingKind()


@dataclass(frozen=True, slots=True)
class OpenPooling:
    """Opens a model on the engine thread, perhaps in another process. Implements ``OpenModel``."""

    folder: ModelFolder
    settings: EngineConfig
    tokenizer: EncoderTokenizer

    def __call__(self, families: MetricFamilies, worker: Worker) -> PendingPoolingModel:
        """Begin to load the folder; see ``PendingPoolingModel``."""
        # The process that reads the folder may be without MLX, and only the one that opens it has
        # the builder.
        from mlx_parallm.pooling.pending import PendingPoolingModel  # noqa: PLC0415

        return PendingPoolingModel(self.folder, self.settings, self.tokenizer, families, worker)


def tokenizer_of(config: ModelConfig, path: Path) -> EncoderTokenizer:
    """Return the tokenizer of a folder for which ``is_read`` is true.

    Raises:
        ModelLoadError: the folder has none.
    """
    model_folder = transformer_folder(path)
    if not is_encoder(model_folder):
        # It brings MLX, which the process of a server without an engine imports for such models
        # alone.
        from mlx_parallm.pooling.decoder_build import read_decoder_tokenizer  # noqa: PLC0415

        return read_decoder_tokenizer(config, path)
    return load_encoder_tokenizer(model_folder, trust_remote_code=config.trust_remote_code)
