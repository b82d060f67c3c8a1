"""`bench projection`: arithmetic on made-up measurements, checked by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from kconvert.convert.cli.bench_text import projection_text
from kconvert.layouts.errors import UnsupportedError
from kconvert.runtime.bench.picture import projection_picture
from kconvert.runtime.bench.shape.projection import (
    MACHINES,
    PROFILES,
    bench_projection,
    best,
    committed,
    exchange_us,
    groups,
    project,
    step_ms,
)

H200, PRO = MACHINES
EXCHANGE = {"rows": [{"M": 1, "way": "ours, with residual and norm", "us": 9.0}]}


def step(budget: int, bucket: int, ms: float, launched: float) -> dict[str, Any]:
    return {
        "what": "ddtree" if budget else "ar", "budget": budget, "bucket": bucket, "context": 1024,
        "ms": ms, "bytes": 9_080_000_000,
        "timeline": {"kernels": {"rows_add_norm": 400.0}, "launched": {"rows_add_norm": launched}},
    }  # fmt: skip


def shape() -> dict[str, Any]:
    rows = [step(0, 1, 3.0, 123), step(7, 8, 6.0, 137), step(15, 16, 9.0, 137)]
    return {
        "rank_of": 8, "layers": 61, "card": "card", "date": "2026-01-01", "commit": "c" * 40,
        "rows": [*rows, {"what": "verify", "budget": None, "context": 1024, "ms": 1.0}],
    }  # fmt: skip


def test_an_exchange_is_latency_and_bytes() -> None:
    assert exchange_us(1, H200, "whole", 9.0) == pytest.approx(9 + 7 * 7168 * 4 / 360e3)
    assert exchange_us(33, PRO, "two shots", 9.0) == pytest.approx(14 + 8 + 33 * 7 * 896 * 6 / 50e3)


def test_a_step_on_its_own_machine_and_on_one_with_less_bandwidth() -> None:
    alone = 122 * exchange_us(1, H200, "whole", 9.0) - 400 + 3 * 8
    assert step_ms(step(0, 1, 3.0, 123), H200, "whole", 9.0, 61) == pytest.approx(3 + alone / 1e3)
    # 9.08 GB: 2 ms at 4.54 TB/s, 5.37 ms at 1.69; 13 exchanges of the drafter
    drafted = 122 * exchange_us(8, PRO, "whole", 9.0) + 13 * exchange_us(8, PRO, "whole", 9.0)
    found = step_ms(step(7, 8, 6.0, 137), PRO, "whole", 9.0, 61)
    assert found == pytest.approx(6 - 2 + 9.08 / 1.69 + (drafted - 400 + 6 * 20) / 1e3)


def test_committed_tokens() -> None:
    assert committed("4.7 committed", 0) == (1, 1)
    assert committed("4.7 committed", 7)[0] == pytest.approx(4.73)
    assert committed("2.7 committed", 7)[0] == pytest.approx(2.7, abs=0.01)
    least, most = committed("2.7 committed", 15)
    each = 0.64 + 0.36 * 0.35  # of what misses, 0.35 is caught
    assert least == pytest.approx(2.7, abs=0.01)
    assert most == pytest.approx(sum(each**depth for depth in range(8)))
    for shares in PROFILES.values():
        assert list(shares) == sorted(shares, reverse=True)


def test_the_table_and_its_picture(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("shape.json", "exchange.json")]
    for path, result in zip(files, (shape(), EXCHANGE), strict=True):
        path.write_text(json.dumps(result))
    table = bench_projection(*files)
    assert table["projected"] and len(table["rows"]) == 2 * 2 * 2 * 3
    text = projection_text(table)
    assert text.startswith("PROJECTED, not measured") and text.count("published:") == 2
    for rows in groups(table).values():
        assert [row["budget"] for row in rows] == [0, 7, 15]
        assert best(rows)["budget"] in (0, 7, 15)
    for suffix in ("svg", "png"):
        picture = tmp_path / f"picture.{suffix}"
        projection_picture(table, picture)
        assert picture.stat().st_size > 10_000


def test_what_is_no_measurement_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no drafted steps of a rank of 8"):
        project({**shape(), "rank_of": 4}, EXCHANGE)
    with pytest.raises(UnsupportedError, match="no exchange of one row"):
        project(shape(), {"rows": []})
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]")
    with pytest.raises(UnsupportedError, match=r"wrong\.json is no result"):
        bench_projection(wrong, wrong)
