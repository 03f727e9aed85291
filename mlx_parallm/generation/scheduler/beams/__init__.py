"""The sequences of a beam search, and the blocks and slots that they need."""
