"""The GPU's engine with launches recorded in place of made: what every kernel would be given."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kconvert.runtime.backends.cuda import CudaBackend
from kconvert.runtime.backends.cuda_decoder import ALONE, AUTO, BUCKETS, CudaDecoder
from kconvert.runtime.config import read_config
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.drafting.cuda_drafter import CudaDrafter
from kconvert.runtime.drafting.dflash import read_weights
from kconvert.runtime.drafting.dflash_config import DrafterConfig, TargetDims
from kconvert.runtime.drafting.sharding import share_of
from kconvert.runtime.kernels.attention import launch as attention
from kconvert.runtime.kernels.drafter import launch as drafter_launch
from kconvert.runtime.kernels.gpu import Gpu
from kconvert.runtime.kernels.linear import launch as linear
from kconvert.runtime.kernels.moe import launch as moe
from kconvert.runtime.kernels.rows import launch as rows
from kconvert.runtime.kernels.tree import launch as tree
from kconvert.runtime.model import Model
from kconvert.runtime.weights import Blobs

GPUS = {
    "sm_90a": Gpu("sm_90a", 228 * 1024, 132),
    "sm_100a": Gpu("sm_100a", 228 * 1024, 148),
    "sm_120a": Gpu("sm_120a", 100 * 1024, 188),
}


class Launch(NamedTuple):
    kernel: str
    defines: dict[str, int]
    grid: tuple[int, ...]
    block: int
    arguments: tuple[Any, ...]
    shared: int
    cluster: int


class Gathering(Ranks):
    """A rank of several without the others."""

    def all_gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor] * self.size)

    def shared_memory(self, size: int, device: torch.device):
        return ([0] * self.size, None) if self.size > 1 else None


def recording(arch: str, monkeypatch: Any) -> list[Launch]:
    """From here on launches go into this list."""
    made: list[Launch] = []

    def record(kernel, defines, grid, block, args, shared=0, cluster=1, overlap=True):
        made.append(Launch(kernel, dict(defines), grid, block, args, shared, cluster))

    for module in (attention, drafter_launch, linear, moe, rows, tree):
        monkeypatch.setattr(module, "launch", record)
    for module in (attention, linear, moe):
        monkeypatch.setattr(module, "gpu", lambda index: GPUS[arch])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return made


def recorded(blobs: Path, drafter: Path, arch: str, ranks: int, monkeypatch: Any) -> list[Launch]:
    """A prompt, and steps of every bucket (elsewhere of the least and the largest), alone and with
    drafts."""
    made = recording(arch, monkeypatch)
    config = read_config(blobs)
    device = torch.device("cpu")
    here = Gathering(0, ranks)
    model = Model(config, Blobs(blobs, here), CudaBackend(config, here, device))
    kind = DrafterConfig.read(drafter)
    target = TargetDims(config.hidden, config.vocabulary, config.layers)
    share = share_of(kind, here)
    weights = read_weights(drafter, kind, target, torch.bfloat16, "cpu", share.cut)
    decoder = CudaDecoder(model, CudaDrafter(share, weights, model))
    decoder._reserve(400)
    decoder._prefill(np.arange(130), 64, drafts=True)
    for bucket in BUCKETS if arch == "sm_90a" else BUCKETS[::6]:
        for step in (ALONE, AUTO):
            decoder._step(bucket, step)
    return made
