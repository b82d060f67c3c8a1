"""The engine: one generate loop over one verify step, in three modes.

`ar` runs the newest token alone; `chain` and `ddtree` run a drafted chain or tree below it, and
commit the path that the target's own choices follow. All modes give the same tokens, and the same
float32 logit bits at every committed position, by the rule in EXACTNESS.md.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from kconvert.layouts.errors import OptionError, UnsupportedError
from kconvert.runtime.backends import device as devices
from kconvert.runtime.backends.cpu import CpuBackend
from kconvert.runtime.backends.protocol import REACH, HostBackend, Sampling
from kconvert.runtime.clock import Clock
from kconvert.runtime.config import ModelConfig, read_config
from kconvert.runtime.distributed import Ranks
from kconvert.runtime.drafting.budget import Calibration, CostCurve, Pauses
from kconvert.runtime.drafting.dflash import Drafter, read_weights
from kconvert.runtime.drafting.dflash_config import DrafterConfig, TargetDims
from kconvert.runtime.drafting.policy import AUTO, NO_TREE, Drafting, measured_costs
from kconvert.runtime.drafting.sharding import Share, share_of
from kconvert.runtime.model import Model
from kconvert.runtime.weights import Blobs

if TYPE_CHECKING:
    from kconvert.runtime.backends.cuda_decoder import CudaDecoder, Drafts
    from kconvert.runtime.drafting.cuda_drafter import CudaDrafter

MODES = ("ar", "chain", "ddtree")
PREFILL_ROWS = 64
_HOTTEST = 1e6  # draws are uniform long before that, and noise · T stays finite
_MOST = 4096  # nodes of a budget: each takes a slot in the cache
_SHARED_HIDDEN = 2048  # below this hidden size, a drafter's operations are too small for threads


@dataclass
class Generation:
    """What `generate` made. Target forward i committed `accepted[i]` tokens (the first is the
    prompt's, which commits one); `logits` are float32 [V] for each token, if they were kept;
    `parts` are seconds by what they were spent on."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    logits: list[NDArray[np.float32]] = field(default_factory=list, repr=False)
    target_forwards: int = 0
    drafter_forwards: int = 0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def committed_per_forward(self) -> float:
        """Tokens that a forward after the prompt commits on average, bonus token included."""
        rest = self.accepted[1:]
        return sum(rest) / len(rest) if rest else 0.0


class Engine:
    """A converted model, ready to generate. `Engine.open` makes one."""

    def __init__(
        self,
        model: Model,
        drafter: "Drafter | CudaDrafter | None",
        decoder: "CudaDecoder | None" = None,
    ) -> None:
        """`decoder` runs texts if the model is on a GPU."""
        self.model, self.drafter, self.decoder = model, drafter, decoder
        self._costs: CostCurve | None = None
        # For the budget "auto": what was learned from one text holds for the next.
        self.pauses, self.calibration = Pauses(), Calibration()

    @classmethod
    def open(
        cls,
        blobs: str | Path,
        drafter: str | Path | None = None,
        dtype: str | None = None,
        ranks: Ranks | None = None,
        device: str = "auto",
        ignore_config_keys: Collection[str] = (),
    ) -> "Engine":
        """Map the converted folder `blobs`, or load it onto the GPU, and read the DFlash `drafter`.

        `device`: "cpu", "cuda", or "auto", which is a GPU if there is one whose kernels take the
        blobs. `dtype`: float32 or bfloat16, what activations are rounded to; if not given, float32
        on the CPU, and on a GPU always bfloat16. `ranks`: this process and the others
        (`ranks_from_environment`); alone if not given. Every rank makes the same calls.

        Raises a KconvertError if `blobs` is no finished output, is for another number of ranks, or
        has a missing or changed file; if the drafter is for another target; if config.json has a
        key that is not known here and not among `ignore_config_keys`.
        """
        folder = Path(blobs)
        ranks = ranks or Ranks()
        mapped = Blobs(folder, ranks)
        config = read_config(folder, ignore_config_keys)
        share = None if drafter is None else share_of(DrafterConfig.read(Path(drafter)), ranks)
        device, dtype = devices.choose(
            device, dtype, folder, config, mapped, ranks, share.nbytes if share else 0
        )
        if device == "cuda":
            return cls._on_gpu(config, mapped, ranks, drafter, share)
        opened = None
        if drafter is not None:
            kind = torch.float32 if dtype == "float32" else torch.bfloat16
            opened = Drafter.open(Path(drafter), _target(config), kind)
            if opened.config.block > REACH:
                raise UnsupportedError(
                    f"the drafter in {drafter} has block_size {opened.config.block}: at most"
                    f" {REACH} can be verified."
                )
        return cls(Model(config, mapped, CpuBackend(config, ranks, dtype)), opened)

    @classmethod
    def _on_gpu(
        cls,
        config: ModelConfig,
        blobs: Blobs,
        ranks: Ranks,
        drafter: str | Path | None,
        share: Share | None,
    ) -> "Engine":
        from kconvert.runtime.backends.cuda import CudaBackend
        from kconvert.runtime.backends.cuda_decoder import CudaDecoder
        from kconvert.runtime.drafting.cuda_drafter import CudaDrafter, check
        from kconvert.runtime.filling.device import memory_on
        from kconvert.runtime.filling.filler import Filler
        from kconvert.runtime.filling.unread import UnreadBlobs

        if share is not None:  # refuse what cannot be run before anything is loaded
            share.config.check_target(_target(config))
            check(share.config)
        ranks, opened = ranks.on_gpus(), None
        device = torch.device("cuda", torch.cuda.current_device())
        with ranks.waiting("opening on {} ranks failed"), Filler(memory_on(device)) as filler:
            model = Model(config, UnreadBlobs(blobs, filler), CudaBackend(config, ranks, device))
            _ = model.weights  # this tells the filler where everything goes
            filler.wait()
            if drafter is not None and share is not None:
                weights = read_weights(
                    Path(drafter), share.whole, _target(config), torch.bfloat16, device, share.cut
                )
                opened = CudaDrafter(share, weights, model)
            return cls(model, opened, CudaDecoder(model, opened))

    def set_threads(self) -> None:
        """Give torch one thread in this process if the drafter is so small that more would mostly
        wait for one another. For a program that does nothing else with torch."""
        drafter = self.drafter
        if self.device == "cpu" and drafter and drafter.config.hidden < _SHARED_HIDDEN:
            torch.set_num_threads(1)

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return "cuda" if self.decoder else "cpu"

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """float32 logits [T, V] at every position of a text, run as a prompt.

        Raises OptionError for tokens that are not valid, CheckpointError if weights were changed.
        """
        tokens = self.checked(token_ids, 0)
        model, ops = self.model, self.model.backend
        with ops.ranks.waiting():
            cache, rows = model.new_cache(len(tokens)), []
            for i in range(0, len(tokens), PREFILL_ROWS):
                hidden, _ = model.forward(ops.sequence(tokens[i : i + PREFILL_ROWS], i), cache)
                rows.append(ops.gather(model.head(hidden)))
        return np.concatenate(rows)

    def generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        mode: str = "ar",
        budget: int | str = AUTO,
        temperature: float = 0.0,
        seed: int = 0,
        *,
        chain_seed: bool = False,
        keep_logits: bool = False,
        prompt_rows: int | None = None,
        bucket: int | None = None,
        on_tokens: Callable[[list[int]], None] = lambda _: None,
    ) -> Generation:
        """Continue `token_ids` by `max_new_tokens` tokens, or up to a stop token (which is kept).

        `budget`: nodes of a draft, or "auto"; `chain_seed`: the likeliest chain comes before
        likelier nodes; `on_tokens` is told tokens as they are committed. These two change no bit:
        `prompt_rows`, the tokens of the prompt in a step, and `bucket`, the rows of a GPU's step.

        Raises OptionError for a mode, budget, temperature, prompt or length that is not valid,
        CheckpointError if logits are not finite or weights were changed.
        """
        prompt = self.checked(token_ids, max_new_tokens)
        self._check_options(mode, budget, temperature, seed)
        result = Generation()
        start = time.perf_counter()
        clock = Clock(result.parts)
        sampling = Sampling(temperature, seed)
        drafter: CudaDecoder | Drafting | None
        if self.decoder:
            drafts = self._drafts(mode, budget, chain_seed)
            drafter = self.decoder if drafts else None
            rounds = self.decoder.rounds(
                prompt, max_new_tokens, sampling, drafts, clock, keep_logits, bucket, prompt_rows
            )
        else:
            drafter = draft = self._drafting(mode, budget, chain_seed, clock)
            slots = len(prompt) + max_new_tokens + (draft.most if draft else 0) + 1
            at_once = prompt_rows or PREFILL_ROWS
            rounds = self._rounds(prompt, slots, sampling, draft, clock, keep_logits, at_once)
        ranks = self.model.backend.ranks
        for tokens, logits in ranks.steps(rounds):
            result.target_forwards += 1
            room = max_new_tokens - len(result.tokens)
            ended = next(
                (i + 1 for i, t in enumerate(tokens) if t in self.model.config.stop_tokens), room
            )
            tokens = tokens[: min(room, ended)]
            result.tokens += tokens
            result.accepted.append(len(tokens))
            if keep_logits:
                result.logits += list(logits[: len(tokens)])
            on_tokens(tokens)
            if len(tokens) == room or tokens[-1] in self.model.config.stop_tokens:
                break
        if ranks.gpus:  # the step that was launched ahead needs the other ranks
            with ranks.waiting():
                torch.cuda.synchronize()
        if drafter:
            result.drafter_forwards = drafter.forwards
        result.seconds = time.perf_counter() - start
        return result

    def _drafts(self, mode: str, budget: int | str, chain_seed: bool) -> "Drafts | None":
        """What is drafted for a text on a GPU; None: nothing."""
        from kconvert.runtime.backends.cuda_decoder import MOST_NODES, Drafts

        if mode == "ar":
            return None
        assert self.drafter is not None  # checked before
        if budget == AUTO:
            self.costs()
        nodes = MOST_NODES if budget == AUTO else int(budget)
        if nodes > MOST_NODES:
            raise OptionError(f"budget {budget}: the GPU's kernels take at most {MOST_NODES}.")
        if mode == "chain":
            nodes = min(nodes, self.drafter.config.block - 1)
        return Drafts(1 if mode == "chain" else nodes, nodes, chain_seed, budget == AUTO)

    def _drafting(
        self, mode: str, budget: int | str, chain_seed: bool, clock: Clock
    ) -> Drafting | None:
        if mode == "ar":
            return None
        drafter = cast(Drafter, self.drafter)  # a mode that drafts has one: checked before
        costs = self.costs() if budget == AUTO else None
        return Drafting(
            self.model, drafter, mode, budget, chain_seed, costs, self.pauses,
            self.calibration, clock,
        )  # fmt: skip

    def _rounds(
        self,
        prompt: NDArray[np.int64],
        slots: int,
        sampling: Sampling,
        draft: Drafting | None,
        clock: Clock,
        keep_logits: bool,
        at_once: int,
    ) -> Iterator[tuple[list[int], NDArray[np.float32]]]:
        """For each target forward, the committed tokens and, if they are kept, the logits they were
        chosen from."""
        model, aux_layers = self.model, draft.aux_layers if draft else ()
        ops: HostBackend = model.backend
        cache, nothing = model.new_cache(slots), np.empty((0, 0), np.float32)
        for begin in range(0, len(prompt), at_once):
            step = ops.sequence(prompt[begin : begin + at_once], begin)
            hidden, features = model.forward(step, cache, aux_layers)
            if draft:
                draft.commit(features)
                draft.catch_up()
        last = ops.sequence(prompt[-1:], len(prompt) - 1)
        logits = model.head(hidden[-1:])
        clock("prefill")
        start = len(prompt)  # positions below are committed
        token = int(ops.pick(logits, last, sampling)[0])
        yield [token], ops.gather(logits) if keep_logits else nothing
        while True:
            clock("host")
            tree = draft(token, start) if draft else NO_TREE
            step = ops.drafted(token, start, tree)
            clock("tree")
            hidden, features = model.forward(step, cache, aux_layers)
            logits = model.head(hidden)
            chosen = ops.pick(logits, step, sampling)
            clock("verify")
            accepted, token = ops.walk(tree, chosen)
            ops.compact(cache, step, accepted)
            start += len(accepted)
            clock("walk")
            if draft:
                draft.commit([rows[accepted] for rows in features])
            kept = ops.gather(logits)[accepted] if keep_logits else nothing
            yield chosen[accepted].tolist(), kept

    def costs(self) -> CostCurve:
        """Seconds of a verify step by its rows, measured once on this machine and model."""
        if self._costs is None:
            with self.model.backend.ranks.waiting():
                decoder = self.decoder
                self._costs = decoder.measure() if decoder else measured_costs(self.model)
        return self._costs

    def checked(self, token_ids: Sequence[int], more: int) -> NDArray[np.int64]:
        """`token_ids` as int64 [T]. Raises OptionError if there are none, one is not a token, or
        they and `more` new ones do not fit the model's positions."""
        config = self.model.config
        if len(token_ids) == 0:
            raise OptionError("the prompt is empty: give at least one token.")
        wrong = next((t for t in token_ids if not 0 <= t < config.vocabulary), None)
        if wrong is not None:
            raise OptionError(
                f"token id {wrong} is out of range: the vocabulary is 0 to {config.vocabulary - 1}."
            )
        if more < 0 or len(token_ids) + more > config.positions:
            raise OptionError(
                f"{len(token_ids)} prompt tokens and {more} new ones do not fit the model's"
                f" {config.positions} positions."
            )
        return np.array(token_ids, np.int64)

    def _check_options(self, mode: str, budget: int | str, temperature: float, seed: int) -> None:
        if mode not in MODES:
            raise OptionError(f"mode {mode!r} is none of {', '.join(MODES)}.")
        if mode != "ar" and self.drafter is None:
            raise OptionError(f"mode {mode} needs a drafter: give its folder (--drafter).")
        if budget != AUTO and not (isinstance(budget, int) and 0 <= budget <= _MOST):
            raise OptionError(f"budget {budget} is neither {AUTO} nor a number from 0 to {_MOST}.")
        if not 0 <= temperature <= _HOTTEST:
            raise OptionError(f"temperature {temperature} is not between 0 and {_HOTTEST:g}.")
        if not 0 <= seed < 2**64:
            raise OptionError(f"seed {seed} is not a number from 0 to 2^64 - 1.")


def _target(config: ModelConfig) -> TargetDims:
    return TargetDims(config.hidden, config.vocabulary, config.layers)
