"""The operations of a forward pass, a module for each backend."""
