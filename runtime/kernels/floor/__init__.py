"""Only reading: the least time in which kernels could touch some bytes."""
