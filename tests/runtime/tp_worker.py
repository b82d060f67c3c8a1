"""One rank of a test: logits of a text, and every mode against ar. Started by torchrun."""

import sys
from pathlib import Path

import numpy as np
from test_engine import NEW, PROMPT, bits, speculate

from kconvert.runtime.distributed import ranks_from_environment
from kconvert.runtime.engine import Engine

blobs, out, dtype = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
ranks = ranks_from_environment(blobs)
engine = Engine.open(blobs, dtype=dtype, ranks=ranks)
truth = engine.generate(PROMPT, NEW, keep_logits=True)
same, forwards = [], {}
for mode, budget in (("chain", 7), ("ddtree", 16), ("ddtree", 64), ("ddtree", "auto")):
    made = speculate(engine, truth, mode=mode, budget=budget)
    forwards[budget] = made.target_forwards
    same.append(made.tokens == truth.tokens and np.array_equal(bits(made), bits(truth)))
if ranks.rank == 0:
    np.savez(out, logits=engine.logits(PROMPT), same=same, forwards=forwards[64])
else:
    engine.logits(PROMPT)
