"""Every option has an effect: a test that fails when the option is ignored.

`tests/options.json` names the test of each public keyword and command-line flag. `python -m tests.options` looks for tests of
those that have none, and writes them, or null; `--check` runs the tests named, each with its option ignored, and names those
that pass.

An option is ignored by taking it from the call, which then has the default. One without a default keeps the value that it had
first.
"""

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.rerun import ROOT, Rerun

FILE = Path(__file__).with_suffix(".json")
_ROOM = ("cache_tokens", "canary", "max_rows", "page_size")
_MADE = "made by a class method, whose options are tested"
REASONS = {
    "progress": "draws a bar",
    "--quiet": "draws no bar, says less",
    "made_by": "made by a call, and read by `cite`",
    **dict.fromkeys(("rl.Answer pattern", "rl.Answer tokens", "rl.Answer after", "rl.Answer reader", "rl.Answer stop"), _MADE),
    "rl.probes.ProbeRows wider": _MADE,
    "rl.probes.LinearProbe alarm": "made by a method, whose options are tested",
    "rl.probes.sweep backend": "who works moves no bit",
    "rl.probes.untrained_rows batch": "how many together moves no bit",
    **dict.fromkeys(("rl.Engine state_tokens", "rl.Engine.load state_tokens"), "how many states are kept moves no bit"),
    **dict.fromkeys(("rl.Engine capture_buffer", "rl.Engine.load capture_buffer"), "where rows wait moves no bit"),
    **dict.fromkeys(("rl.Engine tree_width", "rl.Engine.load tree_width"), "drafts move no committed bit"),
    **dict.fromkeys(
        (f"rl.probes.fit_streaming {each}" for each in ("drafter", "rejected", "window", "batch")), "drafts move no bit"
    ),
    "rl.probes.Split.check keys": "what is known already is not computed again",
    "$ demo --open": "opens a browser",
    "rl.Conversation.generate final": "the row of a turn's last token is always computed",
    **dict.fromkeys(
        ("rl.Branch.resample wave", "rl.Branch.stream_rollouts wave", "rl.Engine.replay batch"),
        "how many together moves no bit",
    ),
    **dict.fromkeys((f"{call} {each}" for call in ("rl.Engine", "rl.Engine.load") for each in _ROOM), "room moves no bit"),
    **dict.fromkeys((f"{call} keep" for call in ("rl.Engine.prompt", "rl.Engine.prompts")), "where rows are held moves no bit"),
    **dict.fromkeys(
        ("rl.SparseFeatures device", "rl.SparseFeatures.load device", "rl.Engine.load device"), "needs a GPU: tests/gpu"
    ),
    **dict.fromkeys(
        ("rl.probes.sweep device", "$ report --device", "$ dump --device", "$ explore --device"), "needs a GPU: tests/gpu"
    ),
    **dict.fromkeys(
        (f"$ {each} --dtype" for each in ("doctor", "warm", "dump", "report", "explore")), "a CPU has one arithmetic"
    ),
    "rl.Engine.load dtype": "a CPU has one arithmetic",
    "rl.Engine.load ranks": "who multiplies moves no bit",
    "rl.Engine.load token": "what a hub asks for, which no test asks",
    "rl.Engine.load check": "refuses, and moves no bit",
    "rl.probes.sweep jobs": "who works moves no bit",
    **dict.fromkeys(("$ doctor --ranks", "$ dump --ranks", "$ warm --processes"), "how many processes work moves no bit"),
    **dict.fromkeys(("$ dump --ray", "$ resample --ray"), "needs a cluster: tests/extras/test_real_cluster.py"),
    "$ resample --chat": "needs a model that chats; what it reads is tested with prompts",
}
"""option, or "call option" -> why nothing can differ; see `reason`"""
_SPELLINGS: dict[tuple[str, str], set[str]] = {}
"""(command, flag) -> all its names, such as --no-rejected"""
_NOT_HERE = ("tests/gpu/", "bench/peers/", "tests/extras/test_real_cluster.py", "tests/engine/test_soak.py")
Known = dict[str, dict[str, str | None]]


# ---- what there is --------------------------------------------------------------------------------------------------------


def calls() -> dict[str, Callable[..., Any]]:
    """Public name -> function, class or method of the package itself."""
    rl: Any = import_module("replaylens")
    found: dict[str, Any] = {}
    for where, module in (("rl", rl), ("rl.probes", rl.probes)):
        for name in module.__all__:
            each = getattr(module, name)
            if inspect.isclass(each) and not issubclass(each, BaseException):
                found[f"{where}.{name}"] = each
                found |= {f"{where}.{name}.{key}": getattr(each, key) for key in _methods(each)}
            elif inspect.isfunction(each):
                found[f"{where}.{name}"] = each
    return found


def _methods(owner: type) -> Iterator[str]:
    """Those that completion lists; see `hides`."""
    for name in dir(object.__new__(owner)):
        plain = inspect.getattr_static(owner, name, None)
        plain = plain.__func__ if isinstance(plain, classmethod | staticmethod) else plain
        if not name.startswith("_") and inspect.isfunction(plain) and plain.__module__.startswith("replaylens"):
            yield name


def keywords() -> dict[str, list[str]]:
    """Public name -> its options: parameters with a default, and those that are given by name."""
    found = {}
    for name, call in calls().items():
        given = inspect.signature(call).parameters.values()
        kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        if options := [each.name for each in given if each.default is not each.empty or each.kind in kinds]:
            found[name] = options
    return found


def flags() -> dict[str, list[str]]:
    """Command -> its flags."""
    from typer.main import get_command

    from replaylens.cli import app

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
        if not hasattr(command, "commands"):
            own = [each for each in command.params if each.opts[0].startswith("--")]
            _SPELLINGS.update({(" ".join(path), each.opts[0]): {*each.opts, *each.secondary_opts} for each in own})
            yield " ".join(path), [each.opts[0] for each in own]
            return
        for name in command.commands:
            yield from walk(command.get_command(None, name), (*path, name))

    return {name: found for name, found in walk(get_command(app), ("$",)) if found}


def options() -> dict[str, list[str]]:
    return keywords() | flags()


def reason(call: str, option: str) -> str | None:
    return REASONS.get(f"{call} {option}", REASONS.get(option))


def read() -> Known:
    known: Known = json.loads(FILE.read_text())
    return known


# ---- ignored --------------------------------------------------------------------------------------------------------------


@contextmanager
def ignored(call: str, option: str, does: bool = True) -> Iterator[None]:
    """While it runs, the call has no such option. does: False passes it on, through the same detour"""
    with _without_flag(call, option, does) if call.startswith("$") else _without_keyword(call, option, does):
        yield


@contextmanager
def _without_flag(call: str, option: str, does: bool) -> Iterator[None]:
    from typer.core import TyperCommand

    names, first, before = call.split()[1:], list[Any](), TyperCommand.invoke

    def invoke(self: Any, context: Any) -> Any:
        if does and self.name == names[-1] and (len(names) == 1 or context.parent.info_name == names[0]):
            (one,) = (each for each in self.params if option in each.opts)
            if one.required:
                first.append(context.params[one.name])
                context.params[one.name] = first[0]
            else:
                context.params[one.name] = one.get_default(context) if not one.multiple else (one.get_default(context) or [])
        return before(self, context)

    TyperCommand.invoke = invoke  # type: ignore[method-assign]
    try:
        yield
    finally:
        TyperCommand.invoke = before  # type: ignore[method-assign]


@contextmanager
def _without_keyword(call: str, option: str, does: bool) -> Iterator[None]:
    owner, _, name = call.rpartition(".")
    found, first = calls()[call], list[Any]()
    signature = inspect.signature(found)
    kind = signature.parameters[option]
    catch_all = kind.kind is kind.VAR_KEYWORD

    def changed(function: Callable[..., Any], skipped: int) -> Callable[..., Any]:
        order = [each for each in inspect.signature(function).parameters][skipped:]

        @wraps(function)
        def instead(*args: Any, **kwargs: Any) -> Any:
            if not does:
                return function(*args, **kwargs)
            place = order.index(option) + skipped if option in order else len(args)
            if catch_all:
                kwargs = {key: each for key, each in kwargs.items() if key in signature.parameters}
            elif option in kwargs:
                first.append(kwargs.pop(option))
            elif place < len(args) and not catch_all:
                first.append(args[place])
                if kind.default is kind.empty or place < len(args) - 1:
                    args = (*args[:place], first[0] if kind.default is kind.empty else kind.default, *args[place + 1 :])
                    return function(*args, **kwargs)
                args = args[:place]
            if kind.default is kind.empty and first and not catch_all:
                kwargs[option] = first[0]
            return function(*args, **kwargs)

        return instead

    if inspect.isclass(found):
        holder, attribute, plain = found, "__init__", vars(found).get("__init__", found.__init__)
    elif owner in calls():
        holder, attribute = calls()[owner], name  # type: ignore[assignment]
        plain = inspect.getattr_static(holder, name)
    else:
        with _everywhere(found, changed(found, 0)):
            yield
        return
    own = attribute in vars(holder)
    wrapped: Any = changed(
        plain.__func__ if isinstance(plain, classmethod | staticmethod) else plain, not isinstance(plain, staticmethod)
    )
    wrapped = type(plain)(wrapped) if isinstance(plain, classmethod | staticmethod) else wrapped
    setattr(holder, attribute, wrapped)
    try:
        yield
    finally:
        setattr(holder, attribute, plain) if own else delattr(holder, attribute)


@contextmanager
def _everywhere(one: Any, other: Any) -> Iterator[None]:
    """Puts `other` wherever a module has `one`."""
    places = [(space, key) for space in _spaces() for key, each in list(space.items()) if each is one]
    for space, key in places:
        space[key] = other
    try:
        yield
    finally:
        for space, key in places:
            space[key] = one


def _spaces() -> list[dict[str, Any]]:
    return [vars(module) for module in list(sys.modules.values()) if isinstance(getattr(module, "__dict__", None), dict)]


def noticed(wanted: Mapping[tuple[str, str], Sequence[str]]) -> dict[tuple[str, str], str]:
    """(call, option) -> the first of the given tests that fails with it ignored."""
    by_test: dict[str, list[tuple[str, str]]] = {}
    for pair, tests in wanted.items():
        for test in tests:
            by_test.setdefault(test, []).append(pair)
    rerun = Rerun(
        lambda test: by_test.get(test, []),
        lambda pair, does: ignored(*pair, does),
        refusals_count=False,
        worth=lambda test: any(pair not in rerun.noticed for pair in by_test.get(test, [])),
    )
    found = rerun.run(sorted(by_test)).noticed
    return {pair: test.partition("[")[0] for pair, test in found.items()}


# ---- tests that name an option --------------------------------------------------------------------------------------------


@cache
def _tests() -> list[tuple[str, bool, ast.AST, int]]:
    """(node id, slow, tree, length) of every test."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = str(path.relative_to(ROOT))
        if file.startswith(_NOT_HERE) or file == "tests/test_golden.py":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = [ast.unparse(each) for each in node.decorator_list]
                slow = any("slow" in each and "parametrize" not in each for each in marks)
                found.append((f"{file}::{node.name}", slow, node, (node.end_lineno or 0) - node.lineno))
    return found


@cache
def _said() -> list[tuple[str, int, frozenset[str], frozenset[tuple[str, str]], frozenset[str]]]:
    """Of every test that is not slow: node id, length, names, (call, keyword) pairs, and keys and texts that are given."""
    found = []
    for name, slow, tree, length in _tests():
        if slow:
            continue
        names, pairs, given = set[str](), set[tuple[str, str]](), set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                pairs |= {(called, each.arg) for each in node.keywords if each.arg}
                given |= {each.arg for each in node.keywords if each.arg}
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                given |= set(node.value.split())
        found.append((name, length, frozenset(names), frozenset(pairs), frozenset(given)))
    return found


def candidates(call: str, option: str) -> list[str]:
    """Tests that give the option to the call, shorter ones first; then those that name both."""
    last = call.rpartition(".")[2].split()[-1]
    ranked = []
    for name, length, names, pairs, given in _said():
        if call.startswith("$"):
            if _SPELLINGS[call, option] & given and (
                last in given or last in name or f"test_{last}" in name or "test_cli" in name
            ):
                ranked.append((0 if last in given else 1, length, name))
        elif (last, option) in pairs:
            ranked.append((0, length, name))
        elif last in names and option in given:
            ranked.append((1, length, name))
    return [name for *_, name in sorted(ranked)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.options", description=__doc__)
    parser.add_argument("only", nargs="*", help="calls; default: all")
    parser.add_argument("--check", action="store_true", help="run the tests that are named")
    parser.add_argument("--tries", type=int, default=4, help="tests to try for an option that has none")
    given = parser.parse_args()
    known: Known = json.loads(FILE.read_text()) if FILE.exists() else {}
    from tests.test_options import EFFECTS

    every = {(call, option) for call, names in options().items() for option in names if not reason(call, option)}
    there = every - EFFECTS.keys()
    known = {call: {key: each for key, each in own.items() if each and (call, key) in there} for call, own in known.items()}
    old = {(call, option): [test] for call, own in known.items() for option, test in own.items()}
    chosen = {pair for pair in there if not given.only or pair[0] in given.only}
    wanted = {pair: old[pair] for pair in chosen & old.keys()} if given.check else {}
    wanted |= {pair: candidates(*pair)[: given.tries] for pair in chosen - old.keys()}
    found = noticed(wanted)
    for (call, option), test in found.items():
        known.setdefault(call, {})[option] = test
    for call, option in there:
        known.setdefault(call, {}).setdefault(option, None)
    lines = {call: dict(sorted(own.items())) for call, own in sorted(known.items()) if own}
    FILE.write_text(json.dumps(lines, indent=1) + "\n")
    left = sorted(wanted.keys() - found.keys())
    print(*(f"{' '.join(pair)}: no test notices it, of {len(wanted[pair])}" for pair in left), sep="\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
