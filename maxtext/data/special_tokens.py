"""What becomes of the names of special tokens, such as `<|endoftext|>`, that stand inside a text.

literal: they are plain text. refuse: the document is a bad record. drop: it is left out and counted. strip: the names
are taken out of its text. Under none of these does a text make a special token, so the ids of a text are the same in
preparation, training and evaluation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from maxtext.data.text_source import Bad, Document

POLICIES = ("literal", "refuse", "drop", "strip")


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """A policy, one of POLICIES, and the names that it looks for."""

    policy: str = "literal"
    names: tuple[str, ...] = ()

    def applied(self, documents: Iterable[Document | Bad]) -> Iterator[Document | Bad]:
        """The documents and bad records as the policy leaves them."""
        if self.policy == "literal" or not self.names:
            yield from documents
            return
        pattern = re.compile("|".join(map(re.escape, sorted(self.names, key=len, reverse=True))))
        for document in documents:
            found = None if isinstance(document, Bad) else pattern.search(document.text)
            yield document if found is None or isinstance(document, Bad) else self._one(document, pattern, found)

    def _one(self, document: Document, pattern: re.Pattern[str], found: re.Match[str]) -> Document | Bad:
        if self.policy == "strip":
            text = document.text
            while (shorter := pattern.sub("", text)) != text:  # what is left may make up another name
                text = shorter
            return dataclasses.replace(document, text=text)
        return Bad(f"{document.file or document.domain}:{document.place}",
                   f"document {document.name}: holds the name of the special token {found[0]} at character "
                   f"{found.start()}", dropped=self.policy == "drop")


LITERAL = SpecialTokens()
