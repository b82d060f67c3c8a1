"""`python -m mutate --count 1000`: change an output or its source in one place, and see whether
validate says so; exit code 1 where it does not."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from mutate.mutations import mutate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mutate", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    options = parser.parse_args()

    def progress(done: int) -> None:
        print(f"mutate: {done}", file=sys.stderr)

    more = () if options.json else (progress,)
    with tempfile.TemporaryDirectory() as folder:
        table = mutate(options.count, options.seed, Path(folder), *more)
    print(json.dumps(table, indent=None if options.json else 1))
    sys.exit(1 if table["failures"] else 0)


if __name__ == "__main__":
    main()
