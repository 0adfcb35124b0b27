"""One field of the schema: its default, its range, and the sentence that documents it."""

from __future__ import annotations

import dataclasses
from typing import Any


def field(doc: str, default: Any = dataclasses.MISSING, also: tuple[str, ...] = (), minimum: float | None = None,
          above: float | None = None, maximum: float | None = None) -> Any:
    """A schema field.

    Args:
      doc: one sentence that says what the field means, with its unit.
      default: its value when the YAML does not give one; without it the key is required. A default that is a dataclass
        type is built from that type's own defaults.
      also: names that other tools use for it, so that an error can point from them to this key.
      minimum, above, maximum: the range of numbers allowed (`above` is exclusive). They apply to each item of a list.
    """
    metadata = {"doc": doc, "also": also, "minimum": minimum, "above": above, "maximum": maximum}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, type) and dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
