"""The output folder: what it holds, and how files get into it, so that nothing is half-written."""
