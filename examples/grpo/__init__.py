"""GRPO against a running server, with rollouts over HTTP and uploads of a LoRA."""
