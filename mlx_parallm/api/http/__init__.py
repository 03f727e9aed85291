"""What is around every route: keys, bodies, errors, streams, connections. It knows no slice."""
