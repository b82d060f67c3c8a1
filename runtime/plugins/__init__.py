"""vLLM and SGLang serve a converted model: loaders that fill them from the blobs without repacking.

`entry` is what the engines call; `vllm` and `sglang` each know one engine, the other modules
know none. Only `vllm`, `sglang` and `device` import torch, which the engine's process has loaded
by then.
"""
