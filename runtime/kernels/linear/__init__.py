"""x times the transpose of a bf16 matrix, row by row: the same bits for any number of rows."""
