"""Typed reading of one YAML value by the declared type of its field. Nothing is guessed: a value fits or is refused."""

from __future__ import annotations

import math
import re
import types
import typing
from typing import Any

from maxtext.config.nodes import Items, Node, Scalar, shown

_NUMBER = re.compile(r"([+-]?)([0-9][0-9_]*)?(?:\.([0-9][0-9_]*)?)?(?:[eE]([+-]?[0-9]{1,6}))?")
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
_YES, _NO = ("yes", "y", "on", "1"), ("no", "n", "off", "0")
_LARGEST_INT = 2**63 - 1
_LONGEST_NUMBER = 300  # characters; Python itself refuses to read integers of thousands of digits


class ValueFault(Exception):
    """A value that does not fit; `faults` are (suffix of the key such as `[1]`, message)."""

    def __init__(self, *faults: tuple[str, str]):
        super().__init__(faults)
        self.faults = faults


def is_optional(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) and type(None) in typing.get_args(kind)


def read_value(kind: Any, node: Node, limits: typing.Mapping[str, Any]) -> Any:
    """Reads a scalar or list as `kind`.

    Args:
      kind: str, int, float, bool, a Literal, a tuple of those, or one of them `| None`.
      node: the value.
      limits: the field's metadata; `minimum`, `above` and `maximum` hold for each number.

    Raises:
      ValueFault: with everything wrong about the value.
    """
    if is_optional(kind):
        if isinstance(node, Scalar) and node.is_null:
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is tuple:
        return _read_tuple(typing.get_args(kind), node, limits)
    if not isinstance(node, Scalar):
        raise ValueFault(("", f"{shown(node)} where {_expected(kind)} is expected"))
    if node.is_null:
        hint = ' (an empty text is "")' if kind is str else ""
        raise ValueFault(("", f"null is not allowed; write {_expected(kind)}{hint}"))
    if typing.get_origin(kind) is typing.Literal:
        return _read_choice(typing.get_args(kind), node)
    value = {str: _read_text, bool: _read_bool, int: _read_int, float: _read_float}[kind](node)
    for name, fits, word in (("minimum", lambda v, m: v >= m, "at least"), ("above", lambda v, m: v > m, "above"),
                             ("maximum", lambda v, m: v <= m, "at most")):
        limit = limits.get(name)
        if limit is not None and not fits(value, limit):
            raise ValueFault(("", f"{shown(node)} is out of range; it must be {word} {limit}"))
    return value


def _read_tuple(kinds: tuple[Any, ...], node: Node, limits: typing.Mapping[str, Any]) -> tuple[Any, ...]:
    open_ended = len(kinds) == 2 and kinds[1] is Ellipsis
    if not isinstance(node, Items):
        example = f"[{shown(node)}]" if isinstance(node, Scalar) and open_ended and not node.is_null else "[...]"
        raise ValueFault(("", f"{shown(node)} where a list is expected; write {example}"))
    if not open_ended and len(node.items) != len(kinds):
        raise ValueFault(("", f"a list of {len(node.items)} where {len(kinds)} values are expected"))
    values, faults = [], []
    for i, item in enumerate(node.items):
        try:
            values.append(read_value(kinds[0] if open_ended else kinds[i], item, limits))
        except ValueFault as fault:
            faults += [(f"[{i}]{suffix}", message) for suffix, message in fault.faults]
    if faults:
        raise ValueFault(*faults)
    return tuple(values)


def _read_choice(allowed: tuple[str, ...], node: Scalar) -> str:
    if node.text in allowed:
        return node.text
    import difflib  # only on the way to an error: it costs as much as reading a config

    near = difflib.get_close_matches(node.text.lower(), allowed, 1, 0.4)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise ValueFault(("", f"{shown(node)} is not one of {', '.join(allowed)}{meant}"))


def _read_text(node: Scalar) -> str:
    return node.text


def _read_bool(node: Scalar) -> bool:
    if node.text in _TRUE:
        return True
    if node.text in _FALSE:
        return False
    word = node.text.lower()
    meant = "true" if word in _YES or word == "true" else "false" if word in _NO or word == "false" else "true or false"
    raise ValueFault(("", f"{shown(node)} is neither true nor false; write {meant}"))


def _parts(node: Scalar) -> tuple[int, int] | None:
    """A decimal number as (digits, exponent): exactly digits x 10**exponent."""
    match = _NUMBER.fullmatch(node.text.strip())
    if not match or not (match[2] or match[3]) or len(node.text) > _LONGEST_NUMBER:
        return None
    whole, fraction = match[2] or "", match[3] or ""
    if any(part.endswith("_") or "__" in part for part in (whole, fraction)):
        return None
    fraction = fraction.replace("_", "")
    digits = int(match[1] + whole.replace("_", "") + fraction)
    return digits, int(match[4] or 0) - len(fraction)


def _read_int(node: Scalar) -> int:
    parts = _parts(node)
    if parts is None:
        raise ValueFault(("", f"{shown(node)} is not an integer; write one such as 1000, 1_000 or 1e3"))
    if re.match(r"[+-]?0[0-9_]", node.text.strip()):
        raise ValueFault(("", f"{shown(node)} has a leading zero, which other YAML readers take as octal; drop it"))
    digits, exponent = parts
    if digits and exponent < 0 and (exponent < -_LONGEST_NUMBER or digits % 10**-exponent):
        raise ValueFault(("", f"{shown(node)} is not a whole number; write an integer"))
    # Past 10^18 only the message matters, and an exponent such as 999999 would be slow to expand.
    value = digits * 10 ** min(exponent, 19) if exponent >= 0 else digits and digits // 10**-exponent
    if abs(value) > _LARGEST_INT:
        raise ValueFault(("", f"{shown(node)} is too large; at most {_LARGEST_INT}"))
    return value


def _read_float(node: Scalar) -> float:
    parts = _parts(node)
    if parts is None:
        word = node.text.strip().lower().lstrip("+-.")
        if word in ("nan", "inf", "infinity"):
            raise ValueFault(("", f"{shown(node)} is not allowed; write a finite number"))
        raise ValueFault(("", f"{shown(node)} is not a number; write one such as 0.1 or 1e-5"))
    value = float(node.text.strip().replace("_", ""))
    if math.isinf(value) or (value == 0 and parts[0]):
        raise ValueFault(("", f"{shown(node)} is out of the range of a float64"))
    return value


def _expected(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    return {str: "a text", bool: "true or false", int: "an integer", float: "a number"}[kind]
