"""Training sessions: a served model learns by forward passes beside its traffic."""
