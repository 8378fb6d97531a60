"""What an error means, whoever raised it."""


def is_lack_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; torch says it in words only on a CPU."""
    said = str(error)
    return isinstance(error, MemoryError) or any(
        words in said for words in ("out of memory", "can't allocate memory")
    )
