"""A baseline without batches, which encodes one text after the other by the model alone.

``python -m benchmarks.embedding_loop FOLDER TEXTS.json DTYPE`` prints the texts per second as JSON.
"""

import json
import sys
import time
from pathlib import Path

from mlx_parallm.models.checkpoints.sentence_transformers import read_vector_spec
from mlx_parallm.tokenizer.encoder_tokenizer import load_encoder_tokenizer
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.worker.device.cpu_process import keep_freed_memory
from mlx_parallm.worker.pooling.loading import load_encoder_runner


def main() -> None:
    folder, texts_file, dtype = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    texts = json.loads(texts_file.read_text())
    keep_freed_memory()
    runner = load_encoder_runner(folder, dtype, read_vector_spec(folder))
    tokenizer = load_encoder_tokenizer(folder)
    runner.run([PoolingInput(tokenizer.encode(texts[:1])[0])])
    begin_s = time.perf_counter()
    for text in texts:
        (ids,) = tokenizer.encode([text])
        runner.run([PoolingInput(ids)])
    print(json.dumps({"texts_per_s": len(texts) / (time.perf_counter() - begin_s)}))


if __name__ == "__main__":
    main()
