"""An output read back: its blobs, how they are cut and joined, the checkpoint they stand for."""
