"""The plan of all K2.6, without any data: sizes, files, shapes, accounts."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kit import KIMI_MINI

from kconvert.convert.accounts import check_accounts
from kconvert.convert.plan import Target, make_plan
from kconvert.convert.prepare import Options, prepare
from kconvert.convert.source.local import open_local
from kconvert.convert.synth.presets import PRESETS, shards
from kconvert.convert.synth.write import shard_bytes, synth
from kconvert.layouts.blob import PAGE, encode_header
from kconvert.layouts.errors import KconvertError
from kconvert.layouts.header import file_order, shard_header
from kconvert.layouts.model import read_model
from kconvert.layouts.registry import layout_named
from kconvert.layouts.sharding import Parallelism


@pytest.fixture(scope="module")
def k26(tmp_path_factory) -> Path:
    """All 595 GB of K2.6, as files that take no space."""
    folder = tmp_path_factory.mktemp("k26") / "source"
    synth(folder, "k2.6", sparse=True)
    return folder


def test_k26_has_the_published_sizes(k26: Path) -> None:
    expected = [995_001_888, *[9_809_047_464] * 9, *[9_809_050_936] * 51]
    expected += [4_697_635_160, 108_556_344, 833_769_904]
    sizes = [path.stat().st_size for path in sorted(k26.glob("*.safetensors"))]
    assert sizes == expected
    assert sum(sizes) == 595_177_988_208
    parts = [file_order(tensors) for tensors in shards(PRESETS["k2.6"])]
    headers = [1_568, *[492_968] * 9, *[496_440] * 51, 344, 568, 37_840]
    assert [len(shard_header(part)) for part in parts] == headers
    assert [shard_bytes(part) for part in parts] == expected
    index = json.loads((k26 / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == 208_550
    assert index["metadata"]["total_size"] == 595_148_192_736


def test_k26_plan_is_quick_and_small(k26: Path, tmp_path: Path) -> None:
    """As a user rehearses it: `convert --dry-run` in a process of its own."""
    code = (
        "import sys\n"
        "from kconvert.convert.cli import main as cli\n"
        "try: cli.run()\n"
        "finally:\n"
        "    status = open('/proc/self/status').read()\n"
        "    print(status.split('VmHWM:')[1].split()[0], file=sys.stderr)\n"
        "    heavy = {'torch', 'compressed_tensors'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", code, "convert", k26, tmp_path / "out", "--tp", "8"]
    outcome = subprocess.run([*command, "--dry-run", "--json"], capture_output=True, text=True)
    assert outcome.returncode in (0, 3), outcome.stderr  # 3: no room for 595 GB here
    table = json.loads(outcome.stdout)
    assert table["source_tensors"] == 208_550
    assert table["files"] == 543
    assert len(table["folders"]) == 9
    assert table["bytes_to_read"] == 595_148_192_736
    assert table["disks"][0]["needed"] == table["bytes_to_write"] > 595_000_000_000
    assert int(outcome.stderr.split()[-1]) <= 400_000  # kilobytes
    assert not (tmp_path / "out").exists()


def test_k26_rank_blobs_have_the_known_shapes(k26: Path) -> None:
    source = open_local(k26)
    model = read_model(source.checkpoint)
    target = Target(layout_named("marlin")(model.dims.quantization), Parallelism(8, 1))
    plan = make_plan(model, source.contents, target)
    files = {file.path: file for file in plan.files}
    rank = files["rank-00003-of-00008/layer-00060.safetensors"].blob_tensors
    shapes = {t.name.rpartition(".")[2]: (t.dtype, t.shape) for t in rank}
    assert shapes == {
        "w13_weight_packed": ("I32", (384, 448, 1024)),
        "w13_weight_scale": ("BF16", (384, 224, 512)),
        "w2_weight_packed": ("I32", (384, 16, 14336)),
        "w2_weight_scale": ("BF16", (384, 8, 7168)),
    }
    assert all(tensor.offset % PAGE == 0 for tensor in rank)
    assert sum(tensor.nbytes for tensor in rank) == 384 * 3_096_576
    common = files["common/layer-00001.safetensors"].blob_tensors
    assert len(common) == 14
    loose = [tensor for tensor in common if tensor.nbytes % PAGE]
    assert loose[0].name.endswith("e_score_correction_bias")  # F32, the widest
    assert common[-len(loose) :] == tuple(loose)
    assert {file.path for file in plan.files} == set(plan.expected)


def test_planned_headers_fit(tmp_path: Path) -> None:
    prepared = prepare(KIMI_MINI, tmp_path / "out", Options(tp=4, ep=2))
    for file in prepared.plan.files:
        tensors = file.blob_tensors
        assert file.header_bytes == len(encode_header(tensors, file.info))
        assert file.header_bytes % PAGE == 0
        ends = [tensor.offset + tensor.nbytes for tensor in tensors]
        assert [tensor.offset for tensor in tensors] == [0, *ends[:-1]]


def test_fingerprints_tell_content_and_purpose_apart(tmp_path: Path) -> None:
    """A rank's blob has one of its own for every parallelism and layout, a common blob one for all;
    twice the same."""

    def fingerprints(part: str, **options: object) -> list[str]:
        plan = prepare(KIMI_MINI, tmp_path / "out", Options(**options)).plan
        return [file.info.fingerprint for file in plan.files if file.path.startswith(part)]

    kinds = [{"tp": 2}, {"tp": 4}, {"tp": 4, "ep": 2}, {"tp": 2, "layout": "w4a16"}]
    every = [fingerprint for kind in kinds for fingerprint in fingerprints("rank", **kind)]
    assert len(set(every)) == len(every) == 2 * (2 + 4 + 4 + 2)
    common = {tuple(fingerprints("common", **kind)) for kind in kinds}
    assert len(common) == 1 and len(set(*common)) == 5
    assert fingerprints("", tp=2) == fingerprints("", tp=2, workers=7)
    assert fingerprints("", tp=2, layers=[1])[0] in fingerprints("", tp=2)


def test_accounts_that_do_not_balance_are_noticed(tmp_path: Path) -> None:
    plan = prepare(KIMI_MINI, tmp_path / "out", Options(tp=2)).plan
    check_accounts(plan)
    job = plan.jobs[1]
    with pytest.raises(KconvertError, match="planned twice"):
        check_accounts(replace(plan, jobs=(job, job)))
    file = job.files[0]
    short = replace(file, tensors=file.tensors[1:])
    with pytest.raises(KconvertError, match="bytes are read and"):
        check_accounts(replace(plan, jobs=(replace(job, files=(short, *job.files[1:])),)))


def test_help_is_quick_to_load() -> None:
    """The modules that cost start-up time are not loaded for --help."""
    code = (
        "import sys\n"
        "from kconvert.convert.cli import main as cli\n"
        "sys.argv = ['kconvert', '--help']\n"
        "try: cli.main()\n"
        "finally: print(sorted({'numba', 'numpy', 'torch'} & set(sys.modules)), file=sys.stderr)\n"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert outcome.stderr.strip() == "[]"
    assert "convert" in outcome.stdout and "validate" in outcome.stdout
