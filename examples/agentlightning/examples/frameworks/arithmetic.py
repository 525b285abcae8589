"""The tool of these programs."""

__all__ = ["multiply"]


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b
