"""One module per group of routes; each route only wires schemas, engine and conversion."""
