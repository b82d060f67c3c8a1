"""`kconvert bench decode`, `exact` and `moe`; what was measured lies in results/."""
