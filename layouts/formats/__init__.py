"""Quantization formats, a file each: codes, scales and zero points by tensor name."""
