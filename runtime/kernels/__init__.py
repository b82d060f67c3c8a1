"""CUDA kernels, a folder a family; NVRTC compiles them at first use."""
