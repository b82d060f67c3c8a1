"""`kconvert doctor`: what this machine has, and what would limit a conversion on it."""
