"""Plots, if matplotlib is installed."""

from __future__ import annotations


def pyplot(option: str):
    """Import matplotlib.pyplot, without a display.

    Args:
        option: of the command line, for the error.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ImportError(
            f"{option} needs matplotlib: `pip install matplotlib`, or run without {option}"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
