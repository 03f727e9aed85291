"""ART's routes: adapters that are replaced in flight."""
