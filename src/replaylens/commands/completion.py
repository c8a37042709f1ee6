"""Shell completion of values: names of tasks, models and drafters."""

from replaylens import tasks

DRAFTERS = ("lens", "tree", "ngram", "model", "self")
"""drafters available to commands; `forced` needs tokens, so it is available from Python only"""


def complete_task(incomplete: str) -> list[str]:
    return [name for name in tasks.names() if name.startswith(incomplete)]


def complete_drafter(incomplete: str) -> list[str]:
    return [name for name in DRAFTERS if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    from replaylens.engine.model import smollm2
    from replaylens.engine.zoo import coin as zoo
    from replaylens.engine.zoo import thinking as thinking_zoo

    known = (*zoo.names(), *thinking_zoo.names(), smollm2.SHORT)
    return [name for name in known if name.startswith(incomplete)]
