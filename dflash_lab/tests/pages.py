"""Read a page the way a test wants to: elements in order, with what stands around them."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any, NoReturn

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}


class Element:
    """One element; `text` is everything written inside it."""

    def __init__(self, tag: str, attributes: dict[str, str], parent: Element | None):
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.inside: list[Element | str] = []

    @property
    def text(self) -> str:
        return "".join(part if isinstance(part, str) else part.text for part in self.inside)

    @property
    def classes(self) -> set[str]:
        return set(self.attributes.get("class", "").split())

    def all(self, tag: str = "", kind: str = "") -> Iterator[Element]:
        """The elements inside it of that tag and class, in order."""
        for part in self.inside:
            if isinstance(part, Element):
                if tag in ("", part.tag) and (not kind or kind in part.classes):
                    yield part
                yield from part.all(tag, kind)

    def by_id(self, name: str) -> Element:
        (found,) = (part for part in self.all() if part.attributes.get("id") == name)
        return found

    def by_class(self, name: str) -> Element:
        """The one element of that class."""
        (found,) = self.all(kind=name)
        return found

    def within(self, kind: str) -> bool:
        """Whether an element around it has that class."""
        return self.parent is not None and (kind in self.parent.classes or self.parent.within(kind))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = self.here = Element("", {}, None)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: value or "" for name, value in attrs}, self.here)
        self.here.inside.append(made)
        if tag not in VOID:
            self.here = made

    def handle_endtag(self, tag: str) -> None:
        assert self.here.tag == tag, f"</{tag}> closes <{self.here.tag}>"
        self.here = self.here.parent or self.root

    def handle_data(self, data: str) -> None:
        self.here.inside.append(data)


def read_page(text: str) -> Element:
    """The tree of a page whose elements are all closed in the order they were opened."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.here is reader.root, f"<{reader.here.tag}> is never closed"
    return reader.root


def shown_text(text: Element) -> str:
    """What a coloured text says: its tokens, without what was drafted in vain."""
    tokens = text.all("bdi")
    return "".join(token.text for token in tokens if not token.within("dl-drafts"))


def unpacked(text: str) -> Any:
    """The values that a page holds deflated, read as strict JSON."""

    def refuse(word: str) -> NoReturn:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(zlib.decompress(base64.b64decode(text)), parse_constant=refuse)


def data_of(page: Element) -> Any:
    """The data that the script of a report reads."""
    return unpacked(page.by_id("data").text)
