"""The models inside the package, by the names under which they are served."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.types.errors import ModelLoadError

DEMO_NAME = "mlx-parallm-demo"
PREFIX = "demo:"
_PACKAGE = Path(__file__).resolve().parent
DEMOS = ("mlm", "sentiment", "embed", "reward", "see", "translate", "cartpole", "memory")
DEMO_FOLDER = _PACKAGE / "chat"
DEMO_FOLDERS = {
    DEMO_NAME: DEMO_FOLDER,
    **{PREFIX + name: _PACKAGE / name for name in DEMOS},
}


def demo_folder(name: str) -> Path | None:
    """Return the folder of a model of the package; None for anything else.

    Raises:
        ModelLoadError: ``demo:`` with a name that there is not.
    """
    if name.startswith(PREFIX) and name not in DEMO_FOLDERS:
        raise ModelLoadError(f"{name} is not one of {', '.join(DEMO_FOLDERS)}.")
    return DEMO_FOLDERS.get(name)
