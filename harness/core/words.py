"""Numbers in what is printed: 1 case, 2 cases; once, 3 times."""


def count(number: int, word: str) -> str:
    """So many of a thing whose plural ends in s."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
