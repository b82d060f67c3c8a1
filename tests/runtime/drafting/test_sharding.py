"""A drafter over several ranks: shares that add up to the whole, the same draft on every rank."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kconvert.runtime.distributed import Ranks
from kconvert.runtime.drafting.dflash import Drafter, read_weights
from kconvert.runtime.drafting.dflash_config import DrafterConfig, TargetDims
from kconvert.runtime.drafting.sharding import Share, share_of

TINY = Path(__file__).parents[2] / "tiny_kimi/drafter"
CONFIG = DrafterConfig.read(TINY)
GROUPED = replace(CONFIG, heads=8, kv_heads=2, head_dim=64)  # a head of keys for four of queries


class Exchange:
    """What each of `size` threads gives, added in rank order, for all of them."""

    def __init__(self, size: int) -> None:
        self._parts: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size)

    def __call__(self, rank: int, part: Tensor) -> Tensor:
        self._parts[rank] = part
        self._barrier.wait()
        total = self._parts[0]
        for other in self._parts[1:]:
            total = total + other
        self._barrier.wait()
        return total


class OneRanks(Drafter):
    """The plain drafter over one rank's share, with the exchanges of the GPU's."""

    def __init__(self, share: Share, weights: dict[str, Tensor], rank: int, exchange: Exchange):
        super().__init__(share.config, {n: share.cut(n, t) for n, t in weights.items()})
        self._share, self._rank, self._exchange = share, rank, exchange

    def context(self, features: Tensor) -> Tensor:
        mine = features[:, self._share.features.start : self._share.features.stop]
        part = functional.linear(mine, self._weights["fc.weight"])
        return self._norm(self._exchange(self._rank, part), "hidden_norm")

    def _project(self, rows: Tensor, name: str) -> Tensor:
        part = super()._project(rows, name)
        whole = name.endswith(("o_proj", "down_proj"))
        return self._exchange(self._rank, part) if whole else part


def random_weights(config: DrafterConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in config.shapes().items()
    }


@pytest.mark.parametrize("config", [CONFIG, GROUPED], ids=["tiny", "grouped"])
@pytest.mark.parametrize("size", [2, 4])
def test_shares_add_up_to_the_whole(config: DrafterConfig, size: int) -> None:
    weights, exchange = random_weights(config), Exchange(size)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, 9, config.features, generator=generator)
    table = torch.randn(config.vocabulary, config.hidden, generator=generator)
    shares = [share_of(config, Ranks(rank, size)) for rank in range(size)]
    assert all(share.is_part for share in shares)

    def draft(drafter: Drafter) -> list[Tensor]:
        made = []
        for rows in features:
            drafter.extend(rows)
            made.append(drafter.draft(5, drafter.length, table, table))
        return made

    wanted = draft(Drafter(config, weights))
    ranks = [OneRanks(share, weights, r, exchange) for r, share in enumerate(shares)]
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(draft, ranks))
    for first, *others, whole in zip(*found, wanted, strict=True):
        assert all(torch.equal(first, other) for other in others)
        assert (first - whole).norm() <= 1e-5 * whole.norm()


def test_bytes_of_a_share() -> None:
    """What is replicated, norms, is little: of K2.6's drafter a rank of eight keeps an eighth."""
    for config, size in ((CONFIG, 2), (GROUPED, 4)):
        share, whole = share_of(config, Ranks(1, size)), share_of(config, Ranks())
        weights = random_weights(config)
        kept = {name: share.cut(name, tensor).bfloat16() for name, tensor in weights.items()}
        assert sum(tensor.nbytes for tensor in kept.values()) == share.nbytes
        assert whole.nbytes == 2 * sum(tensor.numel() for tensor in weights.values())
        assert share.nbytes < 1.2 * whole.nbytes * (2 if config is GROUPED else 1) / size


@pytest.mark.parametrize(
    "changes",
    [{"heads": 9, "kv_heads": 3}, {"intermediate": 96}, {"heads": 2, "kv_heads": 1}],
    ids=["heads", "rows", "columns of one head"],
)
def test_what_does_not_divide_stays_whole(changes: dict[str, int]) -> None:
    config = replace(CONFIG, **changes)
    for rank in range(2):
        share = share_of(config, Ranks(rank, 2))
        assert share.config == config and not share.is_part
        tensor = torch.ones(config.shapes()["layers.0.mlp.up_proj.weight"])
        assert share.cut("layers.0.mlp.up_proj.weight", tensor).shape == tensor.shape


def test_tensors_are_cut_as_they_are_read() -> None:
    target, share = TargetDims(256, 1280, 3), share_of(CONFIG, Ranks(1, 2))
    whole = read_weights(TINY, CONFIG, target, torch.bfloat16, "cpu")
    parts = read_weights(TINY, CONFIG, target, torch.bfloat16, "cpu", share.cut)
    name = "layers.1.self_attn.o_proj.weight"
    assert torch.equal(parts[name], whole[name][:, 128:])
    assert torch.equal(parts["fc.weight"], whole["fc.weight"][:, 384:])
    assert torch.equal(parts["layers.0.self_attn.k_proj.weight"],
                       whole["layers.0.self_attn.k_proj.weight"][64:])  # fmt: skip
