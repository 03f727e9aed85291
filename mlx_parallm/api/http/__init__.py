"""Work around every route: keys, bodies, errors, streams, connections. It imports no slice."""
