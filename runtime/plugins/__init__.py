"""vLLM and SGLang serve a converted model: their loaders, filled from the blobs without repacking.

`entry` is what the engines call; `vllm` and `sglang` know one engine each, all else knows none.
Only `vllm`, `sglang` and `device` import torch, which the engine's process has loaded by then.
"""
