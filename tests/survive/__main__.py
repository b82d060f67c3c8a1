"""`python -m survive kills --count 200 --json`: disturb conversions; exit code 1 where one is
not survived."""

import argparse
import json
import sys
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m survive", description=__doc__)
    parser.add_argument("what", choices=["kills", "power", "faults", "double", "overlap"])
    parser.add_argument("--count", type=int, help="kills, cuts, faults, pairs or rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; default: the system's own")
    parser.add_argument("--layers", type=int, default=4, help="overlap: of K2.6")
    parser.add_argument("--experts", type=int, default=48, help="overlap: experts a layer")
    parser.add_argument("--note", help="to be kept with the result")
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        table = _run(options, Path(folder))
    if options.note:
        table["note"] = options.note
    print(json.dumps(table, indent=None if options.json else 1))
    sys.exit(1 if table["failures"] else 0)


def _run(options: argparse.Namespace, folder: Path) -> dict:
    def progress(done: int) -> None:
        print(f"{options.what}: {done}", file=sys.stderr)

    more = () if options.json else (progress,)
    match options.what:
        case "kills":
            from survive.kills import kills

            return kills(options.count or 200, options.seed, folder, *more)
        case "power":
            from survive.power import power

            return power(options.count or 200, options.seed, folder, *more)
        case "faults":
            from survive.faults import faults

            return faults(options.count or 500, options.seed, folder, *more)
        case "double":
            from survive.double import double

            return double(options.count or 20, options.seed, folder)
        case _:
            from survive.overlap import overlap

            return overlap(folder, options.layers, options.experts, options.count or 1)


if __name__ == "__main__":
    main()
