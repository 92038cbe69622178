from __future__ import annotations

from xml.etree import ElementTree

from halfstep.report import Bar, BarChart, Key, LineChart, Series, picture_file, render
from halfstep.report import document as doc
from tests.report.reader import Page

EVIL = "<b>&\"'</style></svg><script>alert(1)</script> {{ 7 * 7 }} $x$ --> %"


def document(text: str = "words", **changes: object) -> doc.Document:
    """Return a document with every kind of block, `text` in every place of each."""
    key = Key(colour=2, light=True)
    lines = LineChart(x_label=text, series=(Series(label=text, x=(1, 2), y=(3.0, 4.0), marks=(1.5,), key=key),))
    bars = BarChart(x_label=text, bars=(Bar(label=text, text=text, value=1.0, low=0.9, high=1.1),))
    blocks = (
        doc.Paragraph(text=text),
        doc.Bullets(items=(text, text)),
        doc.Note(text=text),
        doc.Facts(facts=(doc.Fact(heading=text, text=text, more=(text,), tone="good"),)),
        doc.Table(caption=text, headers=("name", text), rows=((doc.Cell(text=text), doc.Cell(text=text, tone="bad")),)),
        doc.Gallery(
            figures=(
                doc.Figure(heading=text, caption=text, alt=text, chart=lines),
                doc.Figure(heading=text, caption=text, alt=text, chart=bars),
            ),
            legend=((text, key),),
        ),
        doc.Details(
            summary=text, blocks=(doc.Code(text=text), doc.Details(summary="deeper", blocks=(doc.Note(text=text),)))
        ),
    )
    return doc.Document(title=text, lead=text, sections=(doc.Section(heading=text, blocks=blocks),), footer=text)


def test_a_page_is_whole_html_and_every_block_is_in_it() -> None:
    page = Page(render(document()))
    assert page.problems == []
    assert [len(page.all(tag)) for tag in ("html", "title", "h1", "h2", "main", "table", "details", "figure")] == [
        1, 1, 1, 1, 1, 1, 2, 2,
    ]  # fmt: skip
    assert len(page.all("figcaption")) == 2 and len(page.all("pre")) == 1
    assert page.all("html") == [{"lang": "en"}] and {"charset": "utf-8"} in page.all("meta")
    assert {"class": "bad"} in page.all("td") and {"class": "fact good"} in page.all("div")


def test_a_page_fetches_nothing_and_runs_nothing() -> None:
    assert Page(render(document())).fetches() == []


def test_the_reader_sees_what_would_be_fetched() -> None:
    bad = (
        '<link href="a.css"><script src="b.js"></script><img src="http://c"><a href="https://d">e</a>'
        '<style>@import "f"; p { background: url(g.png) }</style><p onclick="h()" style="fill: url(#i)">j</p><b>'
    )
    page = Page(bad)
    assert len(page.fetches()) == 10 and page.problems == ["<b> is never closed"]


def test_text_is_text_wherever_it_stands() -> None:
    rendered = render(document(EVIL))
    page = Page(rendered)
    assert page.problems == [] and page.fetches() == []
    assert page.all("script") == [] and page.all("b") == []
    assert "49" not in "".join(page.texts)  # no template inside a template
    assert sum(EVIL[:8] in text for text in page.texts) >= 15
    assert all(picture["aria-label"] == EVIL for picture in page.pictures())


def test_every_picture_has_words_for_who_does_not_see_it() -> None:
    pictures = Page(render(document("a line that rises"))).pictures()
    assert len(pictures) == 2
    assert all(p["role"] == "img" and p["aria-label"] == "a line that rises" for p in pictures)


def test_a_page_is_made_for_phones_and_for_both_colour_schemes() -> None:
    text = render(document())
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "@media screen and (prefers-color-scheme: dark)" in text and "color-scheme: light dark" in text
    assert ".scroll { overflow-x: auto;" in text and '<div class="scroll" role="region" tabindex="0"' in text


def test_equal_documents_give_equal_pages() -> None:
    assert render(document()) == render(document())


def test_a_number_and_its_unit_stay_on_one_line_but_code_is_left_alone() -> None:
    text = render(document("1.5 MB, 37 % less"))
    assert "<p>1.5\N{NO-BREAK SPACE}MB, 37\N{NO-BREAK SPACE}% less</p>" in text
    assert "<pre>1.5 MB, 37 % less</pre>" in text


def test_a_picture_stands_alone_and_fetches_nothing() -> None:
    svg = picture_file(BarChart(x_label=EVIL, bars=(Bar(label=EVIL, text="1", value=1.0),), line=1.0), EVIL)
    root = ElementTree.fromstring(svg)
    assert root.findtext("{http://www.w3.org/2000/svg}title") == EVIL
    names = {e.get("id") for e in root.iter()} - {None}
    assert all(e.get("href", "#")[1:] in names | {""} for e in root.iter())
    assert "prefers-color-scheme: dark" in svg and "@import" not in svg and "<script" not in svg.replace(EVIL, "")
    assert [part for part in svg.split() if "http" in part and "www.w3.org" not in part] == []
