"""Nothing that needs CUDA."""
