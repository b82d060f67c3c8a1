"""The engine that reads converted blobs and the kernels it is made of."""
