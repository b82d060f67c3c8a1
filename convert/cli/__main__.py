"""`python -m kconvert.convert.cli`."""

from kconvert.convert.cli.main import main

main()
