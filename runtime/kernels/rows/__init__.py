"""Row-wise operations without a product: embedding, residual and norm, SiLU."""
