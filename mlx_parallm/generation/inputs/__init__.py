"""Inputs besides tokens: what blocks of a prompt mean, which products are kept, who needs them."""
