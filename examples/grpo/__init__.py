"""GRPO against a running server: rollouts over HTTP, updates by upload of a LoRA."""
