"""What bytes on disk mean, on both sides: the checkpoint's and the blobs'. Imports nothing else."""
