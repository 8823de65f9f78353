"""vLLM on CPU, CUDA and ROCm: command line, environment, checks and the NIXL pull handoff."""
