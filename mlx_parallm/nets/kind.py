"""The kind of nets, as the event loop knows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.kind import Kind, MemoryLimit, ModelFolder, OpenModel
from mlx_parallm.engine.status import RequestDoor
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.models.nets.plan import NetPlan, is_net, read_net
from mlx_parallm.nets.client import NetClient
from mlx_parallm.nets.model import NET_TRAITS

if TYPE_CHECKING:
    from mlx_parallm.engine.metrics import MetricFamilies
    from mlx_parallm.nets.pending import PendingNet
    from mlx_parallm.worker.worker import Worker


class NetKind(Kind[NetClient]):
    """The kind of nets."""

    traits = NET_TRAITS

    @override
    def client(self, door: RequestDoor) -> NetClient:
        return NetClient(door)

    @override
    def memory_limit(self, settings: EngineConfig) -> MemoryLimit | None:
        max_bytes = settings.loading.max_encoder_bytes
        if max_bytes is None:
            return None
        return MemoryLimit(max_bytes, "Nets", "--pooling-memory-bytes")

    @override
    def serves(self, config: ModelConfig, path: Path) -> bool:
        del config
        with load_failures(path):
            return is_net(path)

    def read(self, config: ModelConfig, path: Path, settings: EngineConfig) -> OpenModel:
        """Read the layers; see ``Kind``."""
        del settings
        with load_failures(path):
            return OpenNet(ModelFolder(config, path), read_net(path))


#: ``NETS``: the kind, whose ``client`` routes use.
NETS = NetKind()


@dataclass(frozen=True, slots=True)
class OpenNet:
    """Opens a net on the engine thread, perhaps in another process. Implements ``OpenModel``."""

    folder: ModelFolder
    plan: NetPlan

    def __call__(self, families: MetricFamilies, worker: Worker) -> PendingNet:
        """Begin to load the folder; see ``PendingNet``."""
        # The process that reads the folder may be without MLX.
        from mlx_parallm.nets.pending import PendingNet  # noqa: PLC0415

        return PendingNet(self.folder, self.plan, families, worker)
