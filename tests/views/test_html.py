"""Everything that is not markup yet is escaped, wherever it is inserted."""

import json

import pytest
from markupsafe import Markup

from replaylens.views.html import fragment, join, script_json, tag, void
from tests.views.checks import assert_harmless, parsed
from tests.views.conftest import HOSTILE


@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_text(text: str) -> None:
    """As content, attribute and script data, text round-trips unchanged and opens no element."""
    found = parsed(tag("p", text, title=text))
    assert found.tags == ["p"] and found.attributes == [("title", text)]
    assert "".join(found.texts) == text
    block = parsed(tag("script", script_json([text]), type="application/json"))
    assert block.tags == ["script"] and json.loads(script_json([text])) == [text]


def test_escaping_is_what_does_it() -> None:
    """Negative control: text declared as markup becomes an element."""
    assert parsed(tag("p", Markup(HOSTILE[1].removeprefix('">')))).tags == ["p", "img"]
    with pytest.raises(AssertionError):
        assert_harmless(tag("p", Markup('<b onclick="x">')), 0)
    with pytest.raises(AssertionError):
        parsed("<p><b></p>")


def test_attributes() -> None:
    assert tag("p", class_="a", data_x=1, hidden=True, title=None, lang=False) == '<p class="a" data-x="1" hidden></p>'
    assert void("input", type="search") == '<input type="search">'
    assert join(["a<b", tag("b", 1), 2]) == "a&lt;b<b>1</b>2"


def test_markup_is_escaped_in_an_attribute() -> None:
    """Markup that is safe as content is not safe between quotes."""
    hostile = tag("b", "x", title='"')
    assert parsed(tag("p", title=hostile)).attributes == [("title", str(hostile))]


def test_a_fragment_stands_alone() -> None:
    found = assert_harmless(fragment(tag("p", "x")), scripts=1)
    assert found.tags.count("style") == 1


def test_data_of_a_script_is_finite() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_json(float("nan"))
