"""The engine's benches: `kconvert bench moe`, `linear`, `tree`, `exchange`, `load`, `decode`,
`projection` and `exact`. What was measured is in results/."""
