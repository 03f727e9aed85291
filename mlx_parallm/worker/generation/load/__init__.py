"""The load of a generation model: how it runs is chosen by trying, and its runner is made."""
