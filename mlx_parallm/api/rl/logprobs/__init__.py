"""Log-probabilities of completions that are known."""
