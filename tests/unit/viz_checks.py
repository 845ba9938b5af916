"""What must hold for every figure: read from the SVG itself."""

import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass

SVG = "{http://www.w3.org/2000/svg}"
EM = 0.56  # a common width of a character, in units of the font size; DejaVu Sans, which is wide, has 0.6


@dataclass
class Box:
    x: float
    y: float
    right: float
    bottom: float
    text: str = ""

    def overlaps(self, other: "Box") -> bool:
        return self.x < other.right and other.x < self.right and self.y < other.bottom and other.y < self.bottom


def root_of(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def drawn(svg: str, tag: str) -> list[ET.Element]:
    """Elements that are drawn: those outside <defs>."""
    return [child for child in root_of(svg) if child.tag == SVG + tag]


def font_sizes(svg: str) -> dict[str, float]:
    """Class -> pixels."""
    return {name: float(size) for name, size in re.findall(r"\.(\w+)\{font-size:(\d+)px", svg)}


def texts(svg: str) -> list[Box]:
    sizes = font_sizes(svg)
    boxes = []
    for element in drawn(svg, "text"):
        own = re.search(r"font-size:([\d.]+)px", element.get("style", ""))
        size = float(own[1]) if own else next(sizes[c] for c in element.get("class", "").split() if c in sizes)
        assert size >= 12, f"{element.text!r} is set in {size} px"
        x, y, wide = float(element.get("x", 0)), float(element.get("y", 0)), len(element.text or "") * size * EM
        anchor = "middle" if element.get("class") == "l" else element.get("text-anchor", "start")
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        boxes.append(Box(left, y - 0.72 * size, left + wide, y + 0.1 * size, element.text or ""))
    return boxes


def bars(svg: str) -> list[tuple[Box, str]]:
    """Rectangles with their hover text, without the background and the key."""
    found = []
    for rect in drawn(svg, "rect"):
        title = rect.find(SVG + "title")
        x, y, width, height = (float(rect.get(name, 0)) for name in ("x", "y", "width", "height"))
        if title is not None:
            found.append((Box(x, y, x + width, y + height), title.text or ""))
    return found


def repeated_ticks(svg: str) -> list[str]:
    """Numbers that stand twice beside one axis: they are anchored there, in one row or one column."""
    places = [
        (text.text, anchor, text.get("y" if anchor == "middle" else "x"))
        for text in drawn(svg, "text")
        if (anchor := text.get("text-anchor")) and re.fullmatch(r"-?[\d,.]+(e[-+]\d+)?", text.text or "")
    ]
    return [text for (text, *_), count in Counter(places).items() if count > 1]


def check(svg: str) -> None:
    """Well formed, named, within its view box, no text on another, no id or tick twice, every mark with hover text."""
    root = root_of(svg)
    width, height = (float(v) for v in root.get("viewBox", "").split()[2:])
    assert root.get("role") == "img"
    ids = re.findall(r'\sid="([^"]+)"', svg)
    assert len(ids) == len(set(ids))
    assert all(label in ids for label in root.get("aria-labelledby", "-").split())
    assert all(root.find(SVG + name).text for name in ("title", "desc"))
    assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= set(ids)
    assert repeated_ticks(svg) == []
    boxes = texts(svg)
    for box in [*boxes, *(bar for bar, _ in bars(svg))]:
        assert box.x >= 0 and box.right <= width + 0.5 and box.y >= 0 and box.bottom <= height + 0.5, (
            f"{box} leaves the view box"
        )
    boxes.sort(key=lambda box: box.y)
    for i, box in enumerate(boxes):
        for other in boxes[i + 1 :]:
            if other.y > box.bottom:
                break
            assert not box.overlaps(other), f"{box.text!r} overlaps {other.text!r}"
    for rect in drawn(svg, "rect"):
        is_key = float(rect.get("width", 0)) == 18 and float(rect.get("height", 0)) <= 12
        assert rect.find(SVG + "title") is not None or rect.get("class") == "bg" or is_key, ET.tostring(rect)
