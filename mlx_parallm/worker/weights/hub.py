"""Finds folders of models and adapters: local ones, or snapshots from the Hugging Face hub."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm

from mlx_parallm.confinement import check_folder
from mlx_parallm.models.checkpoints.weight_files import missing_files
from mlx_parallm.models.gguf.files import check_not_of_gguf
from mlx_parallm.models.gguf.folder import gguf_folder
from mlx_parallm.types.errors import ModelLoadError

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

PATTERNS = (
    *("*.json", "model*.safetensors", "*.model", "*.spm", "*.tiktoken", "*.txt", "*.jinja"),
    # Whisper's folders of mlx-community.
    "weights.safetensors",
    # Modules of sentence-transformers, such as 2_Dense; and the settings of Stanford's ColBERT.
    *("[0-9]_*/model*.safetensors", "artifact.metadata"),
)
CODE_PATTERNS = ("*.py",)
ADAPTER_PATTERNS = ("adapter_config.json", "adapter_model.safetensors", "adapters.safetensors")
#: ``BYTES_BAR``: the one of a snapshot's progress bars that counts the bytes of all its files.
BYTES_BAR = "huggingface_hub.snapshot_download"


def resolve_model(
    path: str,
    revision: str | None,
    on_progress: Progress,
    *,
    trust_remote_code: bool = False,
) -> Path:
    """Return the folder of a model: downloaded first if it is a hub id, written if it is a file.

    Without a network, and with HF_HUB_OFFLINE=1, a complete snapshot in the cache serves.

    Args:
        path: a folder, a GGUF file, or a hub id such as ``org/name``.
        revision: branch, tag or commit on the hub; ignored for folders and files.
        on_progress: called with a text and the share of bytes that is there, from 0 to 1, from
            the threads that download.
        trust_remote_code: also fetch Python files.

    Raises:
        ModelLoadError: there is neither such a folder nor such a model, or it cannot be fetched.
    """
    folder = check_folder(path)
    if folder is not None:
        if not folder.is_dir():
            return gguf_folder(folder, on_progress)
        check_not_of_gguf(folder)
        return folder
    patterns = (*PATTERNS, *(CODE_PATTERNS if trust_remote_code else ()))
    folder = _download(path, revision, on_progress, patterns)
    if missing := missing_files(folder):
        # The index may call them otherwise.
        folder = _download(path, revision, on_progress, missing)
    return folder


def resolve_adapter(path: str | Path, on_progress: Progress) -> Path:
    """Return the folder of an adapter, downloaded if it is a hub id such as ``org/name``.

    Raises:
        ModelLoadError: there is no such folder and no such adapter on the hub.
    """
    folder = Path(path).expanduser()
    text = str(path)
    if folder.is_dir() or text.startswith((".", "/", "~")) or text.count("/") != 1:
        return folder
    return download_adapter(text, on_progress)


def download_adapter(repo: str, on_progress: Progress) -> Path:
    """Return the folder of an adapter on the hub, such as ``org/name``; see ``resolve_model``.

    Raises:
        ModelLoadError: there is no such adapter, it cannot be fetched, or it is no adapter.
    """
    folder = _download(repo, None, on_progress, ADAPTER_PATTERNS)
    if not (folder / ADAPTER_PATTERNS[0]).is_file():
        raise ModelLoadError(f"{repo} is not an adapter: it has no {ADAPTER_PATTERNS[0]}.")
    return folder


def log_download(text: str, share: float) -> None:
    """Log a download's progress."""
    logger.debug("%s: %.0f %%", text, 100 * share)


def _download(
    path: str, revision: str | None, on_progress: Progress, patterns: Sequence[str]
) -> Path:
    with hub_errors(path, revision):
        snapshot = snapshot_download(
            path,
            revision=revision,
            allow_patterns=list(patterns),
            tqdm_class=progress_class(f"Downloading {path}", on_progress),
        )
    return Path(snapshot)


@contextlib.contextmanager
def hub_errors(path: str, revision: str | None) -> Generator[None]:
    """Raise ``ModelLoadError`` with one sentence for what the hub, or the way to it, refuses."""
    try:
        yield
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{path} is gated: accept its terms on the hub, then set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{path} has no revision {revision!r} on the hub.") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{path} is neither a folder nor on the hub (or it is private: set HF_TOKEN)."
        ) from error
    except HFValidationError as error:
        raise ModelLoadError(f"{path} is neither a folder nor a hub id: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"{path} is not in the local cache and the hub cannot be reached."
        ) from error
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        raise ModelLoadError(f"{path} could not be downloaded: {error}") from error


def progress_class(text: str, on_progress: Progress) -> type[tqdm]:
    """Return a bar class that shows nothing itself and reports the snapshot's bytes instead."""
    lock = Lock()

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts = kwargs.get("name") == BYTES_BAR
            self.reported = -1.0
            # Bars switch themselves off without a terminal and then count nothing.
            super().__init__(*args, **{**kwargs, "disable": False})

        def display(self, *_args: Any, **_kwargs: Any) -> None:
            return

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self.counts and self.total:
                with lock:
                    share = min(self.n / self.total, 1.0)
                    # The total grows as files begin; what was reported never shrinks.
                    if share > self.reported:
                        self.reported = share
                        on_progress(text, share)
            return shown

        def close(self) -> None:
            # The inherited close prints the finished bar.
            self.disable = True

    return ReportingBar
