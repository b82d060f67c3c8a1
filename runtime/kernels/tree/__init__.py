"""Drafts and choices on the device, without a number of the host."""
