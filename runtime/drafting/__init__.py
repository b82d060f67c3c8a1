"""What to draft, and how much: the drafter, draft trees, budgets."""
