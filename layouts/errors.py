"""What can go wrong that a user caused or can mend: one class a kind, each also the builtin it is.

`str(error)` is one sentence that names file, tensor, expected and found, and what to do.
The command line maps each class to an exit code (`convert/cli.py`).
"""


class KconvertError(Exception):
    """An expected failure; its text is shown to the user as it is."""


class CheckpointError(KconvertError, ValueError):
    """The source is damaged, incomplete or contradicts itself."""


class UnsupportedError(KconvertError, ValueError):
    """The source or the options are sound but nothing here can carry them out."""


class OutputError(KconvertError, ValueError):
    """The output folder holds something this run must not touch, or is not an output at all."""


class UnavailableError(KconvertError, OSError):
    """Disk, permission or another run stands in the way; the same command may work later."""
