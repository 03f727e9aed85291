"""``mlx_parallm models pull``, ``list`` and ``rm`` with a hub that misbehaves."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_parallm.peers import child_process
from tests.fake_hub import COMMIT, FakeHub, serve_hub
from tests.pseudo_terminal import PseudoTerminal

REPO = "org/tiny"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 1024,
}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors": hashlib.sha256(b"weights").digest() * 30_000,
    "tokenizer.json": b"{}",
    "README.md": b"# Tiny",
    "modeling.py": b"print('remote code')",
    "q4.gguf": b"GGUF" * 100,
}
INDEXED = "org/indexed"
INDEXED_FILES = {
    "config.json": FILES["config.json"],
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "trunk.safetensors"}}).encode(),
    "trunk.safetensors": b"t" * 1000,
    "other.safetensors": b"o" * 1000,
}
#: Nothing of it is an object of JSON.
ODD = "org/odd"
ODD_FILES = {"config.json": b"[" * 100_000, "model.safetensors": b"w" * 1000}
REPOS = {
    ODD: ODD_FILES,
    REPO: FILES,
    INDEXED: INDEXED_FILES,
    "org/empty": {"README.md": b"# Nothing"},
}
SERVED = {"config.json", "model.safetensors", "tokenizer.json"}
OFFLINE = """
import sys
from mlx_parallm.worker.weights.hub import log_download, resolve_model
print(resolve_model(sys.argv[1], None, log_download))
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    refused = {"org/gated": (403, "GatedRepo"), "org/private": (401, "RepoNotFound")}
    with serve_hub(FakeHub(REPOS, refused)) as served:
        yield served


def models(hub: FakeHub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return child_process.run(
        ["mlx_parallm", "models", *arguments],
        env={**os.environ, **hub.environment(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pull(hub: FakeHub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Nothing listens there: the machine's own memory counts.
    return models(hub, home, "pull", *arguments, "--url", "http://127.0.0.1:9")


def cached(home: Path, repo: str = REPO) -> Path:
    return home / "hub" / f"models--{repo.replace('/', '--')}"


def test_a_pull_that_is_cut_off_three_times_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.num_breaks["model.safetensors"] = 3
    done = pull(hub, tmp_path, REPO)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.rstrip("\n"))
    assert folder == cached(tmp_path) / "snapshots" / COMMIT
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in SERVED
    }
    assert len(hub.ranges["model.safetensors"]) == 4
    size, fit = done.stderr.splitlines()
    assert (
        size == f"{REPO} at {COMMIT[:12]}: 3 files, 937.7 KiB, of which 937.5 KiB are not here yet"
    )
    # 2 layers, keys and values, 2 heads of 16 numbers of 2 bytes, 1,024 tokens.
    assert fit.startswith(
        "fits: weights 937.5 KiB + KV of one context (1,024 tokens) 256 KiB = 1.166 MiB; "
        "this machine has "
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SERVED))
def test_another_digest_is_refused_and_removed(hub: FakeHub, tmp_path: Path, name: str) -> None:
    hub.sent[name] = FILES[name][:-1] + b"!"
    done = pull(hub, tmp_path, REPO)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{name}: what was downloaded has another digest" in done.stderr
    wrong = hashlib.sha256(hub.sent[name]).digest()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert wrong not in {hashlib.sha256(path.read_bytes()).digest() for path in files}
    del hub.sent[name]
    assert pull(hub, tmp_path, REPO).returncode == 0


@pytest.mark.slow
def test_too_little_disk_is_refused_before_anything_large_is_fetched(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.listed["model.safetensors"] = 10**16
    done = pull(hub, tmp_path, REPO)
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not fit: weights" in done.stderr
    assert "org/tiny needs 9.313e+06 GiB more on the disk of" in done.stderr
    assert hub.ranges.keys() == {"config.json"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["org/absent"], "org/absent is neither a folder nor on the hub"),
        (["org/private"], "org/private is neither a folder nor on the hub (or it is private"),
        (["org/gated"], "org/gated is gated: accept its terms on the hub, then set HF_TOKEN."),
        ([REPO, "--revision", "v9"], "org/tiny has no revision 'v9' on the hub."),
        (["what is this?"], "is neither a folder nor a hub id"),
        (["org/empty"], "org/empty has no weights that are read"),
    ],
)
def test_what_cannot_be_pulled_says_why_in_one_line(
    hub: FakeHub, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    done = pull(hub, tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_line(hub: FakeHub, tmp_path: Path) -> None:
    hub.url = "http://127.0.0.1:9"
    done = pull(hub, tmp_path, REPO)
    assert done.returncode == 1
    assert done.stderr.startswith(f"mlx_parallm models: {REPO} could not be downloaded: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_files_that_the_index_or_a_pattern_names_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    folder = Path(pull(hub, tmp_path, INDEXED).stdout.rstrip("\n"))
    assert {path.name for path in folder.iterdir()} == INDEXED_FILES.keys() - {"other.safetensors"}
    more = ("--include", "*.gguf", "--trust-remote-code")
    folder = Path(pull(hub, tmp_path, REPO, *more).stdout.rstrip("\n"))
    assert {path.name for path in folder.iterdir()} == FILES.keys() - {"README.md"}


@pytest.mark.slow
def test_a_pull_that_did_not_end_is_listed_and_not_served_offline(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.sent["model.safetensors"] = FILES["model.safetensors"][:100_000]
    hub.refused_files["tokenizer.json"] = 403
    assert pull(hub, tmp_path, REPO).returncode == 1
    _, row = models(hub, tmp_path, "list").stdout.splitlines()
    assert row.startswith(REPO)
    assert row.endswith("hub cache, partly downloaded")
    offline = {**os.environ, **hub.environment(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", OFFLINE, REPO]
    done = subprocess.run(command, env=offline, capture_output=True, text=True, check=False)
    assert "ModelLoadError: " in done.stderr
    hub.sent.clear()
    hub.refused_files.clear()
    assert pull(hub, tmp_path, REPO).returncode == 0
    assert subprocess.run(command, env=offline, check=True, capture_output=True).stdout


@pytest.mark.slow
def test_a_config_that_says_nothing_is_pulled_as_it_is(hub: FakeHub, tmp_path: Path) -> None:
    done = pull(hub, tmp_path, ODD)
    assert done.returncode == 0
    assert "the weights fit: weights 1000 bytes + KV of one context" in done.stderr


@pytest.mark.slow
def test_a_dry_run_fetches_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    done = pull(hub, tmp_path, REPO, "--dry-run", "--max-model-len", "512")
    assert (done.returncode, done.stdout) == (0, "")
    assert "KV of one context (512 tokens) 128 KiB" in done.stderr
    assert hub.ranges.keys() == {"config.json"}


@pytest.mark.slow
def test_what_was_pulled_is_served_offline_listed_and_removed(hub: FakeHub, tmp_path: Path) -> None:
    folder = pull(hub, tmp_path, REPO).stdout
    offline = {**os.environ, **hub.environment(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", OFFLINE, REPO]
    done = subprocess.run(command, env=offline, capture_output=True, text=True, check=True)
    assert done.stdout == folder
    heading, row = models(hub, tmp_path, "list").stdout.splitlines()
    assert heading.split() == ["NAME", "SIZE", "WHERE"]
    # With what the hub's library notes beside them, the files take a little more.
    assert re.fullmatch(r"org/tiny +93[789]\.?\d* KiB +hub cache", row)
    refused = models(hub, tmp_path, "rm", REPO)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    command = ["mlx_parallm", "models", "rm", REPO]
    with PseudoTerminal(command, {**os.environ, **hub.environment(tmp_path)}) as terminal:
        terminal.wait_for("remove org/tiny (")
        terminal.wait_for("[y/N] ")
        terminal.type("\n")
        assert terminal.wait_for_end() == 1
        assert "nothing was removed" in terminal.shown
    assert cached(tmp_path).exists()
    assert models(hub, tmp_path, "rm", REPO, "--yes").returncode == 0
    assert not cached(tmp_path).exists()
    for name in (REPO, "../..", str(tmp_path)):
        assert models(hub, tmp_path, "rm", name, "--yes").returncode == 2
    assert len(models(hub, tmp_path, "list").stdout.splitlines()) == 1
