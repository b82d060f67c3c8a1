"""`python -m kconvert.convert.cli`."""

from kconvert.convert.cli.main import main

if __name__ == "__main__":  # also loaded by processes that are spawned
    main()
