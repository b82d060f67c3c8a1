"""Blobs into memory: our engine's, vLLM's and SGLang's, on the host or on a GPU. Only `device`
imports torch."""
