"""`kconvert synth`: checkpoints of a real model's names and shapes with random weights."""
