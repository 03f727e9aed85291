"""Times transformers' forwards of batches. Runs in a Python that has it, and imports nothing else.

``PYTHON benchmarks/mezo_reference.py FOLDER THREADS`` reads lines of JSON, lists of token ids. For
each it prints the seconds of two forwards without gradients, padded to the longest, with the head
at the masks alone.
"""

import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers


def main() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(sys.argv[2]))
    model = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.eval()
    mask_id = model.config.vocab_size - 1
    for line in sys.stdin:
        batch = json.loads(line)
        longest = max(map(len, batch))
        ids = torch.full((len(batch), longest), model.config.pad_token_id)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        attention = (ids != model.config.pad_token_id).long()
        begin_s = time.perf_counter()
        with torch.no_grad():
            for _ in range(2):
                hidden = model.roberta(ids, attention_mask=attention).last_hidden_state
                head = model.lm_head
                chosen = head.layer_norm(
                    torch.nn.functional.gelu(head.dense(hidden[ids == mask_id]))
                )
                _ = (chosen @ head.decoder.weight[:2].T).sum().item()
        print(time.perf_counter() - begin_s, flush=True)


if __name__ == "__main__":
    main()
