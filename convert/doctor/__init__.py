"""`kconvert doctor`: what this machine is, and what would limit a conversion on it."""
