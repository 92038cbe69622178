"""The picture of the architecture shows the parts that exist, and their imports."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from tests.architecture.picture import PARTS, PICTURE, drawn, edges, parts, svg


def test_the_picture_is_what_the_imports_say() -> None:
    assert svg() == PICTURE.read_text(encoding="utf-8"), "run `make tables`"


def test_every_part_has_its_place_and_every_import_an_arrow() -> None:
    assert set(parts()) <= set(PARTS)
    picture = ET.fromstring(svg())
    texts = {node.text for node in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert set(parts()) - {""} <= texts
    arrows = [node for node in picture.iter("{http://www.w3.org/2000/svg}path") if node.get("marker-end")]
    found = edges()
    assert len(arrows) == len(drawn(found)) > 15
    assert ("step", "cast") in found and ("cast", "scale") not in found
