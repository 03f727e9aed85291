"""What routers and launchers ask."""
