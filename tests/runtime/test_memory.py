"""Opening a model maps it: resident memory grows with the experts that are used."""

import copy
import json
import subprocess
import sys
from pathlib import Path

from kconvert.convert import convert
from kconvert.convert.synth.presets import PRESETS
from kconvert.convert.synth.write import synth

_SCRIPT = """
import json, sys
from kconvert.runtime.engine import Engine

def resident():
    return sum(int(line.split()[1]) for line in open("/proc/self/status")
               if line.startswith(("RssAnon", "RssFile"))) * 1024

before = resident()
engine = Engine.open(sys.argv[1])
opened = resident()
blobs = engine.model.blobs
experts = "model.layers.1.mlp.experts."
touched = [blobs.expert(f"{experts}{name}_weight_packed", e)
           for name in ("w13", "w2") for e in range(int(sys.argv[2]))]
total = sum(int(array.view("uint8").sum(dtype="int64") > 0) * array.nbytes for array in touched)
print(json.dumps([opened - before, resident() - opened, total]))
"""


def test_resident_memory_follows_what_is_touched(tmp_path: Path, monkeypatch) -> None:
    wide = copy.deepcopy(PRESETS["kimi-mini"])
    wide.config["text_config"]["n_routed_experts"] = 384
    monkeypatch.setitem(PRESETS, "wide", wide)
    synth(tmp_path / "source", "wide")
    made = convert(tmp_path / "source", tmp_path / "blobs")
    touched = {}
    for experts in (96, 288):
        code = [sys.executable, "-c", _SCRIPT, tmp_path / "blobs", str(experts)]
        outcome = subprocess.run(code, capture_output=True, text=True, check=True)
        opening, touching, touched[experts] = json.loads(outcome.stdout)
        assert opening < 0.1 * made.bytes_written
        assert 0.9 * touched[experts] < touching < 1.5 * touched[experts]
    assert touched[96] > 5e6 and 3 * touched[96] == touched[288] < made.bytes_written / 2
