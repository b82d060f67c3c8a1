"""`kconvert doctor`: the estimate, the problems, the text, and what it must never say."""

import copy
import json
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import constants

from kconvert.convert.doctor import diagnose as doctor
from kconvert.convert.doctor import probe
from kconvert.convert.doctor.diagnose import (
    K26_BYTES,
    K26_SHARD,
    Rates,
    doctor_text,
    estimate,
    problems,
)

SECRET = "hf_" + "aBcDeFgH" * 4
RATES = Rates(sha256=2.0, pack=8.0, cores=4, write=1.0, read=4.0)


def healthy() -> dict:
    """What `diagnose` finds on a large machine with two disks."""
    disk = {
        "folder": "/data/out", "file_system": "xfs", "total": 4 * 10**12, "free": 3 * 10**12,
        "writable": True, "write_gbps": 2.0, "read_gbps": 4.0, "direct": True, "why": None,
    }  # fmt: skip
    return {
        "problems": [],
        "cpu": {
            "model": "A CPU", "architecture": "x86_64", "features": {"avx2": True, "sha_ni": False},
            "cores": 8, "quota": 6.5, "sha256_gbps": 0.5, "pack_gbps": 9.0,
        },
        "memory": {"total": 64 * 10**9, "available": 60 * 10**9, "limit": None},
        "disks": {"output": disk, "cache": {**disk, "folder": "/home/cache"}},
        "same_disk": False,
        "packages": {"python": "3.11.0", "huggingface_hub": "2.0", "hf_xet": "1.0", "numba": "1"},
        "hub": {
            "endpoint": "https://huggingface.co", "offline": False, "xet_disabled": False,
            "token": {"present": True, "source": "HF_TOKEN", "why": None},
        },
        "gpu": {
            "driver": "580.65.06", "cuda": "13.0", "nvrtc": "13.0", "why": None,
            "gpus": [
                {"name": "NVIDIA H200", "memory": 150 * 10**9, "compute_capability": "9.0"}
            ] * 8,
        },
    }  # fmt: skip


def changed(**values: object) -> dict:
    """`healthy` with other values, by path with __ for a level."""
    table = copy.deepcopy(healthy())
    for name, value in values.items():
        *levels, last = name.split("__")
        entry = table
        for level in levels:
            entry = entry[level]
        entry[last] = value
    return table


# --- the estimate


def test_each_stage_takes_its_bytes_by_its_rate() -> None:
    result = estimate(RATES)
    hours = {row["stage"]: row["hours"] for row in result["stages"]}
    gigabytes = K26_BYTES / 1e9
    assert hours == pytest.approx(
        {
            "download at 1 Gbit/s": gigabytes * 8 / 3600,
            "download at 10 Gbit/s": gigabytes * 0.8 / 3600,
            "store the shards": gigabytes / 3600,
            "check their sha256": gigabytes / 2 / 3600,  # one thread, whatever the cores
            "read them": gigabytes / 4 / 3600,
            "pack": gigabytes / 32 / 3600,
            "write the blobs": gigabytes / 3600,
        }
    )


def test_slowest_part_and_the_network_that_equals_it() -> None:
    result = estimate(RATES)
    assert result["slowest"] == "disk"  # stores, reads and writes
    assert result["hours"] == pytest.approx(K26_BYTES / 1e9 * (1 + 1 / 4 + 1) / 3600)
    assert result["network_gbit"] == pytest.approx(8 / 2.25)
    assert estimate(RATES._replace(sha256=0.1))["slowest"] == "one core"
    assert estimate(RATES._replace(pack=0.01))["slowest"] == "all cores"


def test_unknown_rates_are_left_out() -> None:
    result = estimate(RATES._replace(write=None, read=None))
    assert result["slowest"] == "one core"
    assert {row["hours"] for row in result["stages"] if row["part"] == "disk"} == {None}
    nothing = estimate(Rates(None, None, 1, None, None))
    assert (nothing["slowest"], nothing["hours"], nothing["network_gbit"]) == (None, None, None)


def test_space_of_one_disk_and_of_two() -> None:
    in_progress = {"output": K26_BYTES + 2 * K26_SHARD}
    assert doctor.space_needed(True) == doctor.space_needed(False) == in_progress
    assert doctor.space_needed(True, keep_shards=True) == {"output": 2 * K26_BYTES}
    kept = {"output": K26_BYTES, "cache": K26_BYTES}
    assert doctor.space_needed(False, keep_shards=True) == kept


def test_k26_is_as_large_as_its_shards() -> None:
    # facts: shard sizes of the Hub's listing
    shards = [995_001_888, *[9_809_047_464] * 9, *[K26_SHARD] * 51]
    assert sum([*shards, 4_697_635_160, 108_556_344, 833_769_904]) == K26_BYTES


# --- problems


def test_nothing_to_complain_about() -> None:
    assert problems(healthy()) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"disks__output__free": 12 * 10**9},
            "The output's disk has 12.0 GB free, a K2.6 conversion needs 614.8 GB:"
            " free 602.8 GB more, or choose another output folder.",
        ),
        (
            {"disks__cache__writable": False},
            "The cache cannot be written to /home/cache: check the permissions, or choose another"
            " cache folder (HF_HUB_CACHE).",
        ),
        (
            {"disks__output__writable": False},
            "The output cannot be written to /data/out: check the permissions, or choose another"
            " output folder.",
        ),
        (
            {"memory__limit": 3 * 10**9},
            "3.0 GB of memory can be used, a K2.6 conversion needs 3.6 GB or more: raise the"
            " memory limit or set HF_HUB_DISABLE_XET=1 (slower downloads).",
        ),
        (
            {"memory__available": 8 * 10**9},
            "8.0 GB of memory can be used, a K2.6 conversion may take 9.6 GB: if it is killed, end"
            " other programs or set HF_HUB_DISABLE_XET=1 (slower downloads).",
        ),
        (
            {"memory__limit": 10**9, "hub__xet_disabled": True},
            "1.0 GB of memory can be used, a K2.6 conversion needs 1.6 GB or more: raise the"
            " memory limit.",
        ),
        (
            {"hub__offline": True},
            "HF_HUB_OFFLINE is set, so only what is in the cache can be converted: unset it to"
            " download.",
        ),
        (
            {"packages__hf_xet": None},
            "hf_xet is not installed, so downloads are slower: pip install hf_xet.",
        ),
        (
            {"hub__token": {"present": False, "source": None, "why": "PermissionError"}},
            "The Hub token cannot be read (PermissionError): hf auth login.",
        ),
    ],
)  # fmt: skip
def test_a_problem_says_what_to_do(changes: dict, sentence: str) -> None:
    assert problems(changed(**changes)) == [sentence]


# --- text


def k26(table: dict) -> dict:
    return {
        **estimate(doctor.rates_in(table)),
        "space_needed": doctor.space_needed(table["same_disk"]),
        "space_needed_with_keep_shards": doctor.space_needed(table["same_disk"], keep_shards=True),
    }


def test_text_of_a_large_machine() -> None:
    table = healthy()
    table["k26"] = k26(table)
    lines = doctor_text(table).splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[0] == (
        "ok: nothing stands in the way of a conversion of Kimi K2.6 (595.2 GB) here"
    )
    for line in (
        "cpu     A CPU, 8 cores, 6.5 by its cgroup; avx2, no sha_ni",
        "        on one core: sha256 0.50 GB/s, packing 9.00 GB/s",
        "memory  64.0 GB, 60.0 GB available, no cgroup limit",
        "output  /data/out: xfs, 3,000.0 GB free, writes 2.00 GB/s, reads 4.00 GB/s",
        "hub     huggingface_hub 2.0, hf_xet 1.0, https://huggingface.co",
        "token   there, from HF_TOKEN",
        "gpu     8 × NVIDIA H200, 150.0 GB, compute capability 9.0; driver 580.65.06, CUDA 13.0",
        "  pack                        0.00   58.50   all cores",  # 6.5 cores, not 8
        "disk space: output 614.8 GB; with --keep-shards: output 595.2 GB, cache 595.2 GB",
        "slowest: one core, 0.33 hours for all it has to do; a network under 4.0 Gbit/s is slower"
        " still",
    ):
        assert line in lines


def test_text_puts_problems_first_and_says_what_is_not_known() -> None:
    table = changed(
        memory={"total": None, "available": None, "limit": 4 * 10**9},
        disks__output__why="read-only file system", disks__output__write_gbps=None,
        gpu={"driver": None, "cuda": None, "gpus": [], "nvrtc": None, "why": "no NVIDIA driver"},
    )  # fmt: skip
    table |= {"problems": ["One.", "Two."], "k26": k26(table)}
    lines = doctor_text(table).splitlines()
    assert lines[0].startswith("2 problems for") and lines[1:3] == ["  One.", "  Two."]
    assert "memory  ?, ? available, 4.0 GB by cgroup" in lines
    assert any("not measured: read-only file system" in line for line in lines)
    assert "gpu     no NVIDIA driver; a conversion needs none" in lines
    assert "  write the blobs                ?       ?   disk" in lines


# --- the whole


def test_the_whole_diagnosis_never_says_the_token(tmp_path: Path, monkeypatch, capfd) -> None:
    for name in ("HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(constants, "ENDPOINT", f"https://me:{SECRET}@hub.example")
    monkeypatch.setattr(probe, "disk_speed", partial(probe.disk_speed, nbytes=16 << 20))
    table = doctor.diagnose(tmp_path / "out", tmp_path / "cache")
    said = json.dumps(table) + doctor_text(table) + "".join(capfd.readouterr())
    assert SECRET not in said and SECRET[3:11] not in said
    assert table["hub"]["token"] == {"present": True, "source": "HF_TOKEN", "why": None}
    assert table["hub"]["endpoint"] == "https://hub.example"
    assert table["same_disk"] and ": the same disk" in doctor_text(table)
    assert table["cpu"]["sha256_gbps"] > 0 and table["cpu"]["pack_gbps"] > 0
    assert list(tmp_path.iterdir()) == []
