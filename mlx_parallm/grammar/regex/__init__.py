"""Regular expressions as finite automata, which read each character once."""
