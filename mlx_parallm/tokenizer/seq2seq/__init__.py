"""Tokenizers with a source and a target side, and the rules of encoder-decoders."""
