"""Reads a page as a tree, strictly: every tag must be closed where it should be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta"}


@dataclass
class Node:
    """An element."""

    tag: str
    attributes: dict[str, str | None]
    children: list[Node | str] = field(default_factory=list)

    def all(self, tag: str = "", **wanted: str) -> list[Node]:
        """All elements below with this tag, and with these attributes; `class_` must be among the classes."""
        return [one for one in self._below() if (not tag or one.tag == tag) and one._has(wanted)]

    def one(self, tag: str = "", **wanted: str) -> Node:
        (found,) = self.all(tag, **wanted)
        return found

    def _below(self) -> Iterator[Node]:
        for child in self.children:
            if isinstance(child, Node):
                yield child
                yield from child._below()

    def _has(self, wanted: dict[str, str]) -> bool:
        for name, value in wanted.items():
            said = self.attributes.get(name.strip("_").replace("_", "-")) or ""
            if value not in (said.split() if name == "class_" else [said]):
                return False
        return True

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.stack = [Node("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice"
        node = Node(tag, dict(attrs))
        self.stack[-1].children.append(node)
        if tag not in VOID:
            self.stack.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.stack[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        node = self.stack.pop()
        assert node.tag == tag, f"<{node.tag}> is closed by </{tag}>"
        if tag == "script" and node.attributes.get("type") == "text/html":
            node.children = parse(node.text).children

    def handle_data(self, data: str) -> None:
        self.stack[-1].children.append(data)


def parse(text: str) -> Node:
    """The page as a tree. What is folded is part of it."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    assert len(parser.stack) == 1, f"<{parser.stack[-1].tag}> is not closed"
    return parser.stack[0]
