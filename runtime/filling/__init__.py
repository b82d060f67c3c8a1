"""Loading blobs into memory: our engine's, vLLM's or SGLang's, on the host or on a GPU. Only
`device` imports torch."""
