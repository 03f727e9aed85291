"""Fine-tuning jobs: training sessions that run to their end, one at a time."""
