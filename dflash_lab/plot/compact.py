"""SVG in fewer characters: the picture is the same to a hundredth of a point."""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?\d+\.\d+")
LETTER = re.compile(r'<use xlink:href="([^"]*)" transform="translate\(([^ )]*) 0\)"/>')
PLACES = re.compile(r'translate\([^)]*\)|\b(?:x|y|width|height)="[^"]*"')
PATH = re.compile(r'\bd="([^"]*)"')
SPACE = re.compile(r"\s*\n\s*")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


def compact(svg: str) -> str:
    """What matplotlib wrote without its comments and indentation, one element a line.

    Coordinates keep two decimals; sizes of letters and strokes are left as they are.
    """
    svg = COMMENT.sub("", svg)
    svg = PATH.sub(lambda found: f'd="{_path(found[1])}"', svg)
    svg = LETTER.sub(r'<use xlink:href="\1" x="\2"/>', svg)
    svg = PLACES.sub(lambda found: _rounded(found[0]), svg)
    return SPACE.sub("\n", svg)


def _path(steps: str) -> str:
    """Steps of a path, each a letter and its coordinates, without the spaces between them."""
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", _rounded(steps)).strip()


def _rounded(text: str) -> str:
    return NUMBER.sub(lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), text)
