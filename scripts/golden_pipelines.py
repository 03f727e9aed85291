"""A writer of the answers of transformers' pipelines: tests/golden/pipelines.json.

Run it by hand, in the environment of ``scripts/golden_encoders.py``:

    /tmp/golden/bin/python -m scripts.golden_pipelines

The models are those of tests/golden/encoders with the tokenizers of ``tests/task_tokenizers.py``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import transformers
from safetensors.numpy import save_file

from scripts.golden_pipeline_cases import CASES, PipelineCase
from tests.golden_weights import golden_weight
from tests.task_tokenizers import write_tokenizer

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"


def main() -> None:
    """Write the answers of all cases."""
    lines = [json.dumps(answers_of(case), ensure_ascii=False) for case in CASES]
    text = "[\n" + ",\n".join(lines) + "\n]\n"
    (GOLDEN / "pipelines.json").write_text(text, encoding="utf-8")
    print(f"{len(CASES)} cases, {len(text)} bytes")


def answers_of(case: PipelineCase) -> dict[str, Any]:
    """Return a case with the pipeline's answer to each of its calls."""
    golden = json.loads((GOLDEN / "encoders" / f"{case.encoder}.json").read_text(encoding="utf-8"))
    config = {**golden["config"], **case.config}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        weights = {name: golden_weight(name, shape) for name, shape in golden["weights"].items()}
        save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})
        write_tokenizer(folder, config["model_type"])
        make: Any = transformers.pipeline
        pipeline = make(case.task, model=name, dtype="float32")
        calls = [
            {"inputs": text, "parameters": parameters, "answer": pipeline(text, **parameters)}
            for text, parameters in case.calls
        ]
    return {
        "task": case.task,
        "encoder": case.encoder,
        "config": case.config,
        "calls": json.loads(json.dumps(calls, default=float)),
    }


if __name__ == "__main__":
    main()
