"""Groups of samples of many prompts, judged on the way."""
