"""Routes for routers and launchers of several servers."""
