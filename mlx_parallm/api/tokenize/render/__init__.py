"""What requests look like to the engine and to templates."""
