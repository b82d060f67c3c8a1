"""`python -m hub FOLDER org/name`: serve a folder, by hand or for a test's subprocess."""

import argparse
import contextlib
import threading

from hub.server import Hub


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hub", description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("repo", help="org/name")
    parser.add_argument("--port", type=int, default=0, help="default: one that is free")
    parser.add_argument("--bandwidth", type=float, help="bytes per second; default: no limit")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt), Hub(options.port, options.bandwidth) as hub:
        hub.add_repo(options.repo, options.folder)
        print(hub.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
