"""`kconvert synth`: checkpoints with a real model's names and shapes, and random weights."""
