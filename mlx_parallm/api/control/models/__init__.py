"""What is served; loading and unloading."""
