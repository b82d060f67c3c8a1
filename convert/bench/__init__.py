"""The compiler's benches: `kconvert bench repack`, `convert`, `reshard`, `validate` and `plan`.
Ratios are measured pair by pair in one run."""
