"""kconvert as a program whose pauses and timeouts are short: `impatient.py SCALE convert …`.

Nothing else is changed: every attempt is made. A pause between attempts lasts SCALE of its time,
and the 30 s that a server may be silent are 2, as HF_HUB_DOWNLOAD_TIMEOUT is set to.
"""

import sys
import time

TIMEOUT = 2.0


def main() -> None:
    scale = float(sys.argv.pop(1))
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(seconds * scale)
    from kconvert.convert.cli import main as cli

    cli.set_environment()
    from kconvert.convert.source import download as arrivals
    from kconvert.convert.source import repo as hub

    pause = arrivals.Arrivals._pause
    arrivals.Arrivals._pause = lambda self, seconds: pause(self, seconds * scale)
    hub._TIMEOUT = TIMEOUT
    cli.main()


if __name__ == "__main__":
    main()
