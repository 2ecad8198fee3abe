"""The zigzag layout dealt like cards: to the last rank and back."""


def positions(padded: int, *, size: int, rank: int) -> list[int]:
    """What a rank holds, in order: position after position is asked whose its chunk is."""
    dealt = [*range(size), *reversed(range(size))]
    chunk = padded // len(dealt)
    return [position for position in range(padded) if dealt[position // chunk] == rank]
