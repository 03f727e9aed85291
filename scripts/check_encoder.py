"""A comparison of an embedder's vectors with those of sentence-transformers, on 200 texts.

    make check-encoder MODEL=folder

Any folder of sentence-transformers will do, encoder or decoder. Both sides compute in float32 and
take texts without prompts. sentence-transformers runs in an environment of its own,
by ``python -m scripts.check_encoder_peer``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from mlx_parallm.config import ModelConfig
from mlx_parallm.pooling.kind import tokenizer_of
from mlx_parallm.pooling.pending import pooling_spec
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.worker.pooling.loading import open_runner
from scripts.varied_texts import varied_texts

LEAST_COSINE = 0.9999
BATCH = 16


def main() -> None:
    """Print the similarity of the vectors; exit with status 1 if it is too low."""
    parser = argparse.ArgumentParser(description="An embedder against sentence-transformers.")
    parser.add_argument("model", type=Path, help="a folder of sentence-transformers")
    parser.add_argument("--peer", required=True, help="a Python that has sentence-transformers")
    args = parser.parse_args()
    texts = varied_texts()
    own, peers = own_vectors(args.model, texts), peer_vectors(args.peer, args.model, texts)
    lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(peers, axis=1)
    cosines = (own * peers).sum(axis=1) / lengths
    worst = int(cosines.argmin())
    print(f"{len(texts)} texts, {own.shape[1]} numbers each")
    print(f"cosine: least {cosines[worst]:.8f}, mean {cosines.mean():.8f}")
    print(f"largest difference of a number: {np.abs(own - peers).max():.2e}")
    if cosines[worst] < LEAST_COSINE:
        sys.exit(f"below {LEAST_COSINE}: text {worst}, {texts[worst][:80]!r}")


def own_vectors(folder: Path, texts: list[str]) -> np.ndarray:
    """Return this package's vectors, float32 ``[texts, dims]``."""
    config = ModelConfig(path=str(folder), dtype="float32")
    tokenizer = tokenizer_of(config, folder)
    runner = open_runner(pooling_spec(config, folder, tokenizer)).finish()
    limit = runner.info.max_model_len
    inputs = [PoolingInput(tokenizer.cut(ids, limit)) for ids in tokenizer.encode(texts)]
    results = []
    for begin in range(0, len(inputs), BATCH):
        results += runner.run(inputs[begin : begin + BATCH])
    vectors = np.stack(results)
    if runner.info.normalizes:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors


def peer_vectors(python: str, folder: Path, texts: list[str]) -> np.ndarray:
    """Return sentence-transformers' vectors, float32 ``[texts, dims]``."""
    with tempfile.TemporaryDirectory() as place:
        texts_file, vectors_file = Path(place, "texts.json"), Path(place, "vectors.npy")
        texts_file.write_text(json.dumps(texts), encoding="utf-8")
        command = [
            python,
            "-m",
            "scripts.check_encoder_peer",
            folder.resolve(),
            texts_file,
            vectors_file,
        ]
        subprocess.run(command, check=True)
        return np.load(vectors_file)


if __name__ == "__main__":
    main()
