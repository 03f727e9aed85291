"""``--api-server-count``: processes that speak HTTP for one server."""
