"""A writer of transformers' results for tiny vision-language models: tests/golden/vision.

Run it by hand, in an environment of its own that has torch:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors numpy pillow
    /tmp/golden/bin/python -m scripts.golden_vision [--only part-of-a-name]

As in ``golden_encoders`` a file holds names and shapes of weights beside the config. The results
are features of images, logits, and the tokens that greedy decoding chooses.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import save_file

from mlx_parallm.images.families import FAMILIES
from scripts.golden_encoders import lines, numbers
from scripts.golden_vision_cases import CASES
from scripts.golden_vision_parts import SHOWN_ROWS, SPECIALS, VOCAB, VisionCase, golden_image
from tests.golden_weights import golden_weight

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "vision"
NEW_TOKENS = 32
# UNUSED: what image processors return that models do not take.
UNUSED = ("rows", "cols", "num_crops", "num_patches", "num_soft_tokens_per_image")


def main() -> None:
    """Write the files of all cases, or of those whose names contain ``--only``."""
    parser = argparse.ArgumentParser(description="Golden values of vision-language models.")
    parser.add_argument("--only", default="", help="a part of the names of the cases to write")
    only = parser.parse_args().only
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if only in case.name:
            text = lines(golden_values(case))
            (FOLDER / f"{case.name}.json").write_text(text, encoding="utf-8")
            print(f"{case.name}: {len(text)} bytes")


def golden_values(case: VisionCase) -> dict[str, Any]:
    """Return config, weights by name and shape, prompts and results of a case."""
    kind = getattr(transformers, case.architecture)
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.AutoConfig.for_model(**case.config)
        kind(config).save_pretrained(folder)
        shapes = case.published(_shapes(Path(folder)))
        weights = {name: golden_weight(name, shape) for name, shape in shapes.items()}
        save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
        model, report = kind.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        if any(report[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            raise ValueError(f"transformers read {case.name} with {report}")
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(case.processor))
        processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        written = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return {
        "config": written,
        "processor": case.processor,
        "weights": shapes,
        "prompts": [
            _prompt(case, model.eval(), processor, number) for number in range(len(case.sizes))
        ],
    }


def _shapes(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def _prompt(case: VisionCase, model: Any, processor: Any, number: int) -> dict[str, Any]:
    """Return a prompt as ids, and what the model makes of it."""
    family = FAMILIES[case.config["model_type"]](case.config)
    random = np.random.RandomState(number)
    ids: list[int] = random.randint(len(SPECIALS), VOCAB, size=3).tolist()
    made: list[dict[str, Any]] = []
    for place, (height, width) in enumerate(case.sizes[number]):
        image = Image.fromarray(golden_image(10 * number + place, height, width))
        arrays = processor(images=[image], return_tensors="np", **family.options)
        written = family.written(arrays)
        ids += _ids(case.before + written.text + case.after, written.runs, family.feature_token)
        ids += random.randint(len(SPECIALS), VOCAB, size=2 + place).tolist()
        made.append(dict(arrays))
    arguments = _arguments(made, ids, family.feature_token)
    inputs: dict[str, Any] = {}
    text_model = getattr(model.model, "language_model", None) or model.model.text_model
    hook = text_model.register_forward_pre_hook(
        lambda _module, _args, named: inputs.update(named), with_kwargs=True
    )
    with torch.no_grad():
        features = _features(model, arguments)
        logits = model(**arguments).logits[0, -1]
        hook.remove()
        tokens = model.generate(
            **arguments, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=VOCAB
        )
    return {
        "sizes": case.sizes[number],
        "ids": ids,
        "features": features,
        "embeddings": _embeddings(inputs["inputs_embeds"][0], ids, family.feature_token),
        "positions": _positions(inputs.get("position_ids")),
        "logits": numbers([logits])[0],
        "tokens": tokens[0, len(ids) :].tolist(),
    }


def _ids(text: str, runs: tuple[int, ...], feature_token: str) -> list[int]:
    """Return the ids of marks, each feature token repeated for its run; other texts have none."""
    ids: list[int] = []
    rest = iter(runs)
    while text:
        mark = next((each for each in SPECIALS if text.startswith(each)), None)
        if mark is not None:
            count = next(rest) if mark == feature_token else 1
            ids += [SPECIALS.index(mark)] * count
        text = text[len(mark or " ") :]
    return ids


def _arguments(made: list[dict[str, Any]], ids: list[int], feature_token: str) -> dict[str, Any]:
    """Return the model's inputs for one prompt."""
    arguments: dict[str, Any] = {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones((1, len(ids)), dtype=torch.long),
    }
    for name in made[0] if made else ():
        arrays = [np.asarray(each[name]) for each in made]
        if name not in UNUSED:
            arguments[name] = torch.from_numpy(_together(arrays))
    is_feature = [token_id == SPECIALS.index(feature_token) for token_id in ids]
    if "image_grid_thw" in arguments or "image_position_ids" in arguments:
        arguments["mm_token_type_ids"] = torch.tensor([is_feature]).int()
    if feature_token == "<image_soft_token>" and made:
        arguments["token_type_ids"] = torch.tensor([is_feature]).int()
    return arguments


def _together(arrays: list[np.ndarray]) -> np.ndarray:
    """Return the arrays of all images as one, with zeros where one is smaller than others."""
    sizes = np.max([array.shape[1:] for array in arrays], axis=0)
    return np.concatenate(
        [
            np.pad(
                array,
                [
                    (0, 0),
                    *((0, most - own) for own, most in zip(array.shape[1:], sizes, strict=True)),
                ],
            )
            for array in arrays
        ]
    )


def _embeddings(rows: Any, ids: list[int], feature_token: str) -> dict[str, Any]:
    """Return what the text model reads at some places: the first, and those around images."""
    is_feature = [token_id == SPECIALS.index(feature_token) for token_id in ids]
    if not any(is_feature):
        return {"places": [0], "rows": numbers([rows[[0]]])[0]}
    first, after = is_feature.index(True), len(ids) - is_feature[::-1].index(True)
    places = [0, first - 1, first, after - 1, after]
    return {"places": places, "rows": numbers([rows[places]])[0]}


def _positions(position_ids: Any) -> list[list[int]] | None:
    """Return the ids of each axis; None if there is one axis, whose ids are places."""
    if position_ids is None or position_ids.ndim < 3:
        return None
    return position_ids[-3:, 0].tolist()


def _features(model: Any, arguments: dict[str, Any]) -> list[Any]:
    """Return some rows of the features of all images of a prompt."""
    names = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask")
    names = (*names, "image_position_ids")
    pixels = {name: arguments[name] for name in names if name in arguments}
    if not pixels:
        return []
    output = model.get_image_features(**pixels)
    output = getattr(output, "pooler_output", output)
    parts = list(output) if isinstance(output, list | tuple) else [output]
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
    return numbers([rows[list(SHOWN_ROWS)]])[0]


if __name__ == "__main__":
    main()
