"""HTTP: schemas in, server-sent events out. Nothing below this package knows HTTP."""
