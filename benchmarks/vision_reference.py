"""Continues prompts with images by transformers. Runs in a Python that has it and torch.

``PYTHON benchmarks/vision_reference.py FOLDER`` reads lines of JSON, each with ``token_ids``, the
``image``'s file and ``max_tokens``, and prints the tokens that greedy decoding chooses.
"""

import inspect
import json
import sys

import torch  # pyright: ignore[reportMissingImports]
import transformers
from PIL import Image


def main() -> None:
    transformers.logging.set_verbosity_error()
    folder = sys.argv[1]
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    parameters = set(inspect.signature(model.forward).parameters)
    image_id = getattr(model.config, "image_token_id", None)
    for line in sys.stdin:
        prompt = json.loads(line)
        image = Image.open(prompt["image"]).convert("RGB")
        arrays = dict(processor(images=[image], return_tensors="pt", **prompt["options"]))
        ids = torch.tensor([prompt["token_ids"]])
        # Processors also give figures for prompts, which are written already.
        arrays = {name: array for name, array in arrays.items() if name in parameters}
        for name in parameters & {"mm_token_type_ids", "token_type_ids"}:
            arrays[name] = (ids == image_id).int()
        with torch.no_grad():
            tokens = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=prompt["max_tokens"],
                do_sample=False,
                **arrays,
            )
        print(json.dumps(tokens[0, ids.shape[1] :].tolist()), flush=True)


if __name__ == "__main__":
    main()
