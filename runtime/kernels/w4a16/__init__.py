"""A plain product with weights in the checkpoint's own order: the kernels' yardstick for values."""
