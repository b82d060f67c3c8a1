"""The routed experts: router, alignment, w13, w2, combine."""
