"""The texts of the GPU kernels, one folder a language, and what turns them into functions."""
