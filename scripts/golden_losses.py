"""A writer of torch's losses and gradients of tiny models with a LoRA: tests/golden/losses.

Run it by hand, in an environment of its own:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2 safetensors numpy
    /tmp/golden/bin/python -m scripts.golden_losses

A file holds config and weights of the model as in ``scripts/golden_encoders.py``, names and shapes
of the adapter's tensors, the loss and its rows, and by name the gradient of the mean loss. Weights
are ``golden_weight`` and ``golden_adapter_weight`` of their names. ``optimisers.json`` has
parameters after steps of torch's optimisers.

The formulas are those of TRL: ``DPOTrainer`` (sigmoid), ``RewardTrainer`` with
``center_rewards_coefficient``, and ``GRPOTrainer`` with ``beta``, summed over tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from scripts.golden_decoder_cases import ONE_LABEL, QWEN3
from scripts.golden_encoders import lines, numbers
from tests.golden_weights import golden_adapter_weight, golden_weight

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "losses"
RANK, ALPHA = 2, 4
BERT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    **ONE_LABEL,
}
DECODER: dict[str, Any] = {**QWEN3, "tie_word_embeddings": False}
#: ``PAIRS``: prompt, chosen and rejected continuation.
PAIRS = [
    ([42, 17, 77], [14, 80, 10], [84, 69]),
    ([21, 6, 81, 76, 11], [30], [55, 25, 23, 89]),
    ([16, 33], [34, 5, 9, 60], [12, 70, 8]),
]
REFERENCE = [[-20.5, -11.25], [-7.5, -31.0], [-25.0, -18.0]]
BETA = 0.3
MARGINS = [0.0, 0.5, 1.5]
CENTRING = 0.05
#: ``POLICY``: the samples are the chosen continuations; each has an advantage.
ADVANTAGES = [1.25, -0.75, 0.5]
CLIP_LOW, CLIP_HIGH, KL = 0.2, 0.28, 0.04


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, kind, config, targets, loss in (
        ("dpo", "Qwen3ForCausalLM", DECODER, ("q_proj", "v_proj"), dpo),
        ("policy", "Qwen3ForCausalLM", DECODER, ("o_proj", "up_proj"), policy),
        ("pairwise_bert", "BertForSequenceClassification", BERT, ("query", "value"), pairwise),
        (
            "pairwise_qwen3",
            "Qwen3ForSequenceClassification",
            {**QWEN3, **ONE_LABEL},
            ("q_proj", "v_proj"),
            pairwise,
        ),
    ):
        values = golden(kind, config, targets, loss)
        (FOLDER / f"{name}.json").write_text(lines(values), encoding="utf-8")
    (FOLDER / "optimisers.json").write_text(json.dumps(optimisers()) + "\n", encoding="utf-8")


def golden(kind: str, config: dict[str, Any], targets: tuple[str, ...], loss: Any) -> Any:
    """Return a file's values for a class of transformers."""
    model_class = getattr(transformers, kind)
    settings = model_class.config_class(**config)
    model = model_class(settings)
    shapes = {name: list(each.shape) for name, each in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = torch.tensor(golden_weight(name, parameter.shape))
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets), lora_dropout=0.0)
    adapted = get_peft_model(model.eval(), lora).eval()
    trained = {name: each for name, each in adapted.named_parameters() if "lora_" in name}
    for name, parameter in trained.items():
        parameter.data = torch.tensor(golden_adapter_weight(name, parameter.shape))
    losses, facts = loss(adapted)
    losses.mean().backward()
    return {
        "config": config | {"model_type": settings.model_type, "architectures": [kind]},
        "weights": shapes,
        "rank": RANK,
        "alpha": ALPHA,
        "adapter": {name: list(each.shape) for name, each in trained.items()},
        "pairs": PAIRS,
        "losses": numbers([losses.detach()])[0],
        **facts,
        "gradients": {
            name: numbers([each.grad])[0] for name, each in trained.items() if each.grad is not None
        },
    }


def logprobs(model: Any, prompt: list[int], choice: list[int]) -> torch.Tensor:
    """Return the log-probability of each token of a continuation."""
    logits = model(torch.tensor([prompt + choice])).logits[0, len(prompt) - 1 : -1]
    return functional.log_softmax(logits, -1)[torch.arange(len(choice)), torch.tensor(choice)]


def dpo(model: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the losses of preferences."""
    sums = [[logprobs(model, prompt, each).sum() for each in pair] for prompt, *pair in PAIRS]
    moved = torch.stack([torch.stack(each) for each in sums]) - torch.tensor(REFERENCE)
    margins = BETA * (moved[:, 0] - moved[:, 1])
    facts = {"margins": numbers([margins.detach()])[0], "beta": BETA, "reference": REFERENCE}
    return -functional.logsigmoid(margins), facts


def pairwise(model: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the losses of pairs of scores; a text is a prompt and its continuation."""
    scores = [
        torch.stack([model(torch.tensor([prompt + each])).logits[0, 0] for each in pair])
        for prompt, *pair in PAIRS
    ]
    table = torch.stack(scores)
    margins = table[:, 0] - table[:, 1]
    losses = -functional.logsigmoid(margins - torch.tensor(MARGINS))
    facts = {"margins": numbers([margins.detach()])[0], "wanted": MARGINS, "centring": CENTRING}
    return losses + CENTRING * table.sum(-1) ** 2, facts


def policy(model: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the losses of samples, whose old log-probabilities are near their own."""
    losses: list[torch.Tensor] = []
    old: list[list[float]] = []
    reference: list[list[float]] = []
    for (prompt, sample, _), advantage in zip(PAIRS, ADVANTAGES, strict=True):
        own = logprobs(model, prompt, sample)
        places = torch.arange(len(sample))
        before = numbers([own.detach() + 0.3 * torch.cos(1.7 * places)])[0]
        start = numbers([own.detach() - 0.2 * torch.sin(2.3 * places + 1)])[0]
        ratio = torch.exp(own - torch.tensor(before))
        clipped = torch.clamp(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
        away = torch.tensor(start) - own
        divergence = torch.exp(away) - away - 1
        each = -torch.min(ratio * advantage, clipped * advantage) + KL * divergence
        losses.append(each.sum())
        old.append(before)
        reference.append(start)
    facts = {
        "advantages": ADVANTAGES,
        "old": old,
        "reference": reference,
        "clip": [CLIP_LOW, CLIP_HIGH],
        "kl": KL,
    }
    return torch.stack(losses), facts


def optimisers() -> dict[str, Any]:
    """Return settings of optimisers, and parameters and norms after each of a few steps."""
    gradients = [torch.tensor(golden_weight(f"step{step}", (16,))) for step in range(4)]
    gradients[2] = gradients[2] * 40
    cases: list[dict[str, Any]] = []
    for kind in ("adam", "adamw"):
        for decay, most in ((0.0, None), (0.1, 1.0)):
            theta = torch.nn.Parameter(torch.tensor(golden_weight("theta", (16,))))
            maker = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
            optimiser = maker([theta], lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
            steps: list[Any] = []
            for gradient in gradients:
                theta.grad = gradient.clone()
                norm = torch.nn.utils.clip_grad_norm_([theta], most or float("inf"))
                optimiser.step()
                steps.append({"norm": float(norm), "theta": numbers([theta.detach()])[0]})
            settings = {"kind": kind, "weight_decay": decay, "max_grad_norm": most}
            cases.append({"settings": settings, "steps": steps})
    return {
        "learning_rate": 0.01,
        "betas": [0.8, 0.95],
        "epsilon": 1e-6,
        "gradients": numbers(gradients),
        "cases": cases,
    }


if __name__ == "__main__":
    main()
