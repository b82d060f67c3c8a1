"""`python -m fuzz --count 100000`: try so many mutated inputs; exit code 1 if one fails."""

import argparse
import json
import sys

from fuzz.harness import made_world, run
from fuzz.targets import TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", choices=list(TARGETS), help="one target")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    with made_world() as world:
        report = run(
            world, options.count, options.seed, options.first,
            only=options.only, progress=_progress,
        )  # fmt: skip
    if options.json:
        print(json.dumps(report.table(), indent=1))
    else:
        accepted, refused = report.accepted.total(), report.refused.total()
        print(
            f"{report.count:,} cases in {report.seconds} s: {accepted:,} accepted, {refused:,}"
            f" refused in {report.sentences:,} sentences, {report.failed:,} failed; slowest"
            f" {report.slowest_seconds} s, memory grew by {report.growth_bytes:,} bytes"
        )
        for failure in report.failures:
            print(
                f"\n{failure.times} × {failure.target} at {failure.where}: {failure.reason}\n"
                f"--seed {failure.seed} --first {failure.case} --count 1\n{failure.trace}"
            )
    sys.exit(1 if report.failed else 0)


def _progress(done: int) -> None:
    if done % 10_000 == 0:
        print(f"{done:,} cases", file=sys.stderr)


if __name__ == "__main__":
    main()
