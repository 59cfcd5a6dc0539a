"""How a long-running process treats its garbage."""

import gc


def settle() -> None:
    """Leave out of every collection what was made by the start, and collect a batch rather than its pieces.

    A batch makes a hundred thousand objects that die together when it ends; by default the collector would look
    at the living after every seven hundred. Counting in process, collecting took 20 to 27 % of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
