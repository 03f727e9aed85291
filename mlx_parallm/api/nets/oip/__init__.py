"""Open Inference Protocol v2 (KServe, Triton): nets for clients that know tensors alone."""
