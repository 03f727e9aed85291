"""Guesses what a sequence goes on with, for the model to check. Pure Python; no array in here."""
