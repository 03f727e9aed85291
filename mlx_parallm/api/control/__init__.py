"""Routes that change the server, or report its state."""
