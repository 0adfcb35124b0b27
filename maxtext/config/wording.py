"""Phrases that messages of several rules share."""

from __future__ import annotations

from typing import Any

Problem = tuple[str, str]  # dotted key, message


def division(number: int, by: int) -> str:
    """(17 = 5 x 3 + 2)."""
    return f"({number} = {by} x {number // by} + {number % by})"


def either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def with_key(key: str, message: str) -> str:
    """The message of a key, which is not said twice where the message begins with it or with one below it."""
    return message if message.startswith((f"{key} ", f"{key}.")) else f"{key}: {message}"


def counted(number: int | str, noun: str) -> str:
    """1 device, 1,024 devices."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}" if isinstance(number, int) else f"{number} {noun}s"


def multiples(number: int, unit: int) -> str:
    low = number // unit * unit
    return f"{low} or {low + unit}" if low else str(unit)


def default_of(section: Any, name: str) -> Any:
    return type(section).__dataclass_fields__[name].default
