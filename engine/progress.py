"""Whether a progress bar is shown: if it is asked for, and somebody looks at it."""

import sys


def hidden(progress: bool) -> bool:
    """The `disable` of a tqdm bar. In a log file or a pipe, each of its updates would be a line of its own; a notebook has no
    terminal either, but draws the bar."""
    watched = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    return not (progress and watched)
