"""A validation as one HTML file that needs nothing else."""
