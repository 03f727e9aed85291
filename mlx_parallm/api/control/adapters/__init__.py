"""Loading, listing and unloading adapters while the server runs."""
