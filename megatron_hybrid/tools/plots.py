"""Drawing, where matplotlib is installed."""

from __future__ import annotations


def pyplot(option: str):
    """matplotlib.pyplot without a display.

    Args:
        option: of the command line, which needs it.

    Raises:
        ImportError: it is not installed; says what to do.
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
