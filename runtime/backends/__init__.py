"""The operations of a forward pass, a module a backend."""
