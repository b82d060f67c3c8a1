"""`kconvert bench repack`, `convert` and `plan`: ratios, measured pair by pair in one run."""
