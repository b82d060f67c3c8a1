"""MLA over the latent cache: norm, rotate and store; absorb; attend; expand."""
