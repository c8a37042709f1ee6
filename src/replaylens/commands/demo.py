"""`replaylens demo`: an embedded model at work, in a minute."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from replaylens.engine import zoo
from replaylens.engine.lens import LensLayer, next_token_by_layer
from replaylens.engine.model import Decoder
from replaylens.tasks import Example, WordTokenizer

MODEL = "coin-plain"
FACES = ("heads", "tails")
LENGTHS = (*range(1, 9), 10, 12, 16)


def demo(
    examples: Annotated[int, typer.Option(min=1, help="Examples per number of actors and start face.")] = 50,
    show: Annotated[int, typer.Option(min=0, help="Examples to show layer by layer.")] = 3,
) -> None:
    """Let the embedded model answer coin-flip questions it was not trained on, and look at its layers."""
    console = Console()
    model, tokenizer = zoo.load_embedded(MODEL)
    trained = zoo.recipe(MODEL).longest
    console.print(f"[bold]{MODEL}[/bold]: {model.config.num_layers} layers, trained on 1 to {trained} actors.")
    console.print(_accuracy(model, tokenizer, examples))
    for example in _to_show(show):
        console.print(_layers(example, next_token_by_layer(model, tokenizer, example.prompt)))


def _accuracy(model: Decoder, tokenizer: WordTokenizer, number: int) -> Table:
    table = Table(title=f"Right answers to held-out questions ({number} per cell)")
    table.add_column("actors", justify="right")
    for face in FACES:
        table.add_column(f"from {face}", justify="right")
    for length in LENGTHS:
        tests = [zoo.held_out(zoo.TESTS[f"picture, from {face}"], length, number) for face in FACES]
        table.add_row(str(length), *(f"{zoo.accuracy(model, tokenizer, test):.1%}" for test in tests))
    return table


def _to_show(number: int) -> list[Example]:
    """Examples of 2, 3, 4, ... actors, from heads and tails in turn."""
    return [zoo.held_out(zoo.TESTS[f"picture, from {FACES[i % 2]}"], 2 + i % 7, i + 1)[-1] for i in range(number)]


def _layers(example: Example, layers: list[LensLayer]) -> Table:
    table = Table(title=f"{example.prompt}[bold]{example.answer}[/bold]", title_justify="left", min_width=60)
    table.add_column("read at")
    table.add_column("next token, by the lens")
    for layer in layers:
        told = "   ".join(f"{guess.token.strip()} {guess.probability:.2f}" for guess in layer.guesses)
        right = layer.guesses[0].token == example.answer
        table.add_row(layer.site, f"[green]{told}[/green]" if right else told)
    return table
