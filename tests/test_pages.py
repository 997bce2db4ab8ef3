"""Pages and pictures of a report: whole, escaped, needing nothing else, the same for the same content."""

import copy
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from hesscore.pages.definitions import DEFINITIONS
from hesscore.pages.figures import FIGURES, draw, inline
from hesscore.pages.markdown import escaped, markdown
from hesscore.pages.page import CAPTIONS, page
from hesscore.pages.spectra import smooth
from hesscore.pages.style import INK
from hesscore.pages.tables import cell, tables
from hesscore.report import COLUMNS
from tests.command import ROOT

SAMPLE = ROOT / "sample_runs/pydoc/report-end.json"
VOID = {"meta", "link", "br", "hr", "img", "input"}


@pytest.fixture(scope="module")
def content():
    return json.loads(SAMPLE.read_text())


@pytest.fixture(scope="module")
def html(content):
    return page(content)


class Tags(HTMLParser):
    """Every tag with its attributes; ``open`` must be empty at the end."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def bare(content):
    """A report of one block that has nothing else, as --components gives."""
    rows = [dict.fromkeys(COLUMNS) | {"component": "norm1", "parameter": "weight", "shape": "4", "tensor": "x"}]
    rows[0] |= {"layer": 0, "n_params": 4, "converged": False, "condition_is_exact": False, "note": "not finite"}
    empty = {"model": None, "stability": None, "heterogeneity": None, "activations": None}
    return content | empty | {"rows": rows, "causes": {}, "spectra": {}, "kinds": {}}


# --- the page ---


def test_it_is_well_formed_and_its_links_lead_somewhere(html):
    found = Tags(html)
    assert found.open == []
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    links = [attributes["href"] for tag, attributes in found.tags if tag == "a"]
    assert len(links) == len(FIGURES) + 6
    assert all(link.removeprefix("#") in ids for link in links)


def test_it_needs_nothing_else(html):
    """No address of anything but a name space, and nothing that is loaded."""
    html = re.sub(r"data:image/png;base64,[^\"]*", "", html)  # pictures within figures
    addresses = set(re.findall(r"""(?:https?:)?//[^\s"'<>)]+""", html))
    assert all(re.match(r"http://(www\.w3\.org|purl\.org|creativecommons\.org)/", address) for address in addresses)
    loading = [(tag, attrs) for tag, attrs in Tags(html).tags if tag in ("img", "iframe", "object", "embed")]
    loading += [(tag, attrs) for tag, attrs in Tags(html).tags if tag == "script" and "src" in attrs]
    assert loading == []
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)


def test_every_figure_and_every_table_is_there(content, html):
    for title, about in CAPTIONS.values():
        assert f">{title}</h2>" in html
        assert about.replace("'", "&#39;") in html
    for table in tables(content):
        assert f">{table.title}</h2>" in html
        assert html.count("<tr>") > len(table.rows)
    assert [table.title for table in tables(content)] == ["Blocks", "Causes", "Activations", "Norms", "Units"]
    assert len(tables(content)[0].rows) == 1 + len(content["rows"])


def test_every_column_has_its_definition(content):
    assert set(COLUMNS) <= set(DEFINITIONS)
    for table in tables(content):
        assert set(table.columns) <= set(DEFINITIONS)
    used = {column for table in tables(content) for column in table.columns} | set(COLUMNS)
    errors = {"mean_stderr", "peak_error"}
    assert set(DEFINITIONS) == used | errors


def test_numbers_are_sorted_by_their_digits(content, html):
    row = content["rows"][0]
    assert f'data-key="{row["lambda_max"]}"' in html
    assert cell(row, "lambda_max").text == "862.2"
    assert cell(row, "condition").text.startswith("> ")
    assert cell(dict.fromkeys(row), "trace").text == "-"


HOSTILE = "<script>alert(1)</script>\"'&|`*_[x](y)"


def test_what_a_file_calls_things_is_shown_and_not_run(content):
    evil = copy.deepcopy(content) | {"source": HOSTILE, "notes": [HOSTILE], "data": HOSTILE}
    for row in evil["rows"]:
        row["note"] = row["component"] = HOSTILE
    shown = page(evil)
    assert "<script>alert" not in shown
    assert Tags(shown).open == []
    assert [tag for tag, _ in Tags(shown).tags].count("script") == 1
    text = markdown(evil)
    assert "<script>" not in text
    assert escaped(HOSTILE) in text


def test_the_same_content_gives_the_same_bytes(content, html):
    assert page(json.loads(json.dumps(content))) == html
    assert str(INK) not in html


def test_what_is_missing_leaves_no_empty_heading(content):
    shown = page(bare(content))
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", shown)
    assert titles == ["Blocks", "Glossary"]
    assert Tags(shown).open == []
    assert markdown(bare(content)).startswith("## Curvature of ")


# --- figures ---


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_alike_each_time(content, name):
    svg: Any = draw(content, name, "x.svg")
    again = draw(content, name, "x.svg")
    assert svg == again
    assert svg.startswith(b"<?xml")
    png: Any = draw(content, name, "x.png")
    assert png.startswith(b"\x89PNG")
    assert b"<dc:date>" not in svg


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_without_data_is_left_out(content, name):
    assert draw(bare(content), name, "x.svg") is None
    assert inline(bare(content), name) is None


def test_within_a_page_the_ink_is_that_of_the_page(content):
    svg = inline(content, "heat")
    assert svg is not None
    assert INK not in svg
    assert "currentColor" in svg


def test_bars_of_causes_add_up_to_a_hundred_percent(content):
    figure: Any = FIGURES["causes"](content)
    (axes,) = figure.axes
    bars: Any = axes.patches
    lines: dict[float, float] = {}
    for bar in bars:
        lines[bar.get_y()] = lines.get(bar.get_y(), 0.0) + bar.get_width()
    widths = [width for width in lines.values() if width]
    assert len(widths) == 25
    assert widths == pytest.approx([100.0] * 25, rel=1e-6)


def test_the_density_is_a_density():
    """Of ``asinh(lambda/unit)``: it integrates to one."""
    axis, density = smooth({"eigenvalues": [-1.0, 0.0, 3.0], "weights": [0.2, 0.5, 0.3]}, 0.1)
    assert float(density.sum() * (axis[1] - axis[0])) == pytest.approx(1, abs=1e-3)


# --- the summary in Markdown ---


def test_the_summary_is_a_table_of_the_sharpest_blocks(content):
    text = markdown(content)
    lines = text.splitlines()
    start = lines.index("| block | lambda_max | what causes most of it |")
    rows = lines[start + 2 : start + 12]
    assert all(line.count("|") == 4 for line in rows)
    assert rows[0].startswith("| embed.token.weight | 862.2 | loss 98 %, ")
    assert any("of the edge of stability" in line for line in lines)
    assert text.endswith("\n")
