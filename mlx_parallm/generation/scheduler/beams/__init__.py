"""Beam search: which hypotheses go on, and the blocks and slots that they need."""
