"""The Thinking-States picture from plain data."""

import io
from dataclasses import replace

from rich.console import Console

from replaylens.views.thoughts import DrawnChunk, DrawnRound, Thinking
from tests.views.checks import assert_harmless
from tests.views.conftest import HOSTILE

PICTURE = Thinking(
    (
        DrawnChunk(("A", " coin"), ("<EOS>",)),
        DrawnChunk((" flips", ","), (" tails", "<EOS>"), facts=("log-prob\t-0.1",)),
        DrawnChunk(HOSTILE, (HOSTILE[0], "<EOS>"), state=2.5),
    ),
    (DrawnRound(0, 2, 3), DrawnRound(2, 3, 3)),
)


def test_text_tells_thoughts_states_and_rounds() -> None:
    lines = str(PICTURE).splitlines()
    assert "no state" in lines[1] and "->   tails <EOS>" in lines[1] and "|S| 2.50" in lines[2]
    assert lines[3:] == [
        "round 1: chunks 0 to 2 at once, KV kept up to chunk 1, chunks 2 to 2 rolled back",
        "round 2: chunks 2 to 2 at once, KV kept up to chunk 2",
    ]
    assert [chunk.thinks for chunk in PICTURE.chunks] == [False, True, True]
    out = io.StringIO()
    Console(file=out, width=200).print(PICTURE)
    assert "tails <EOS>" in out.getvalue() and "2.50" in out.getvalue()


def test_the_picture_has_the_parts_of_the_papers_figure() -> None:
    """L_in and L_out at their layers, the KV cache, arrows from X to T, S added with a plus; norms do not read as sums."""
    html = replace(PICTURE, layers=(0, 2))._repr_html_().split("</style>")[1].split("<script>")[0]
    assert "L_in, after block 0" in html and "L_out, after block 2" in html and "KV cache" in html
    assert html.count('class="rl-plus">+') == 3 and html.count('class="rl-up"') == 6
    assert "|S2| = 2.50" in html and "S0 = 0" in html and "+ 2.50" not in html
    assert "L_out<" in PICTURE._repr_html_(), "where the layers are not known, the names alone"


def test_the_answer_has_the_colour_of_thoughts() -> None:
    with_answer = replace(PICTURE, chunks=(*PICTURE.chunks, DrawnChunk((" heads", "."), ())))
    html = with_answer._repr_html_()
    assert '<span class="rl-token rl-accepted"> heads</span>' in html
    assert '<span class="rl-token rl-accepted"> tails</span>' in html, "a thought"
    assert '<span class="rl-token rl-prompt"> flips</span>' in html


def test_html_has_a_column_a_chunk_and_a_bar_a_round() -> None:
    found = assert_harmless(PICTURE._repr_html_(), scripts=1)
    classes = [value or "" for name, value in found.attributes if name == "class"]
    assert sum(c.startswith("rl-chunk") for c in classes) == sum(c.startswith("rl-thought") for c in classes) == 3
    assert classes.count("rl-bar rl-accepted") == 2 and classes.count("rl-bar rl-rejected") == 1
