"""The DFlash drafter's attention: heads normed, rotated and kept; a block over its context."""
