"""Every name, path, flag and command in backticks exists: in docstrings, comments, error texts and pages.

Read from syntax trees alone, without an import. Words that are neither ours nor Python's, such as another library's, are listed
in `WORDS` of `tests/docs/pages.py`.
"""

import ast
import builtins
import keyword
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import PurePath

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks
from tests.docs.pages import WORDS

OTHERS = {word for words in WORDS.values() for word in words}
ROOMS = ("engine/", "kernels/", "probes/", "tasks/", "src/replaylens/")
"""whose texts are checked, as are the pages"""
OTHER_ROOMS = ("tests/", "bench/", "notebooks/", "docs/")
"""whose definitions and paths count, too"""
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NAME = re.compile(r"[A-Za-z_]\w*")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
PATH = re.compile(r"[\w./-]+\.(?:py|md|json|toml|txt|ipynb|js|css|cff|safetensors|parquet|npz)|[\w./-]+/")
OF_OURS = re.compile(r"\b(?:replaylens|rl|tasks|probes|kernels)(?:\.[A-Za-z_]\w*)+")
"""a name of ours in an error text, with or without backticks"""
DEFINITION = re.compile(r"^ *(?:def|class) (\w+)|^([A-Z_]+)\b[^=\n]*=", re.MULTILINE)
STORED = ("Z", "thinking", "features", "probes")
"""what names of stored tensors begin with"""
HANDLES = {"engine", "branch"}
"""variables that a docstring names without having them"""
PLACEHOLDER = re.compile(r"(?<![A-Za-z])(?:NAME|K|PID|RANDOM)(?![A-Za-z_])")
REFERENCE = re.compile(r"\b(?:[Aa]s(?: for)?|[Ss]ee) $")
"""before a name that must be a definition, not just any variable"""

Scope = str | list[str]
"""a class by its name, or a module's files"""


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree, each before those in it. As `ast.walk`, in half of the time: how a name is used is left out."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name, value in vars(node).items():
            if type(value) is list:
                waiting += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                waiting.append(value)


class Code:
    """What the code defines. Names are told apart as far as their syntax does."""

    def __init__(self, sources: dict[str, str], files: Sequence[str], others: str) -> None:
        """
        sources  path -> text, of the Python files of the rooms
        files    every path of the project
        others   the text of Python files elsewhere, whose definitions count
        """
        self.names: dict[str, set[str]] = {}
        """file -> names, attributes, parameters and short strings in it"""
        self.tops: dict[str, set[str]] = {}
        """file -> what it binds at its top, imports included"""
        self.members: dict[str, set[str]] = defaultdict(set)
        """class -> methods, fields, and attributes of self"""
        self.bases: dict[str, set[str]] = defaultdict(set)
        self.modules: dict[str, list[str]] = defaultdict(list)
        """last word of a module's name -> its files"""
        self.defined = {a or b for a, b in DEFINITION.findall(others)}
        self.parameters: set[str] = set()
        self.keys: set[str] = set()
        """words of strings without a space: keys, columns, sites"""
        self.libraries: set[str] = set()
        """whole modules that a file imports, which are not ours"""
        for path, text in sources.items():
            self._read(path, parsed(text))
        self.members = defaultdict(set, {name: self._inherited(name, set()) for name in self.members})
        self.attributes = set().union(*self.members.values())
        self.defined |= self.attributes | set(self.modules) | set(self.members) | set().union(*self.tops.values())
        self.everything = self.defined.union(*self.names.values()) | {*dir(builtins), *keyword.kwlist}
        shown = {file.removeprefix("src/replaylens/") for file in files} | set(files)
        folders = {str(folder) for file in shown for folder in PurePath(file).parents}
        parts = [PurePath(path).parts for path in shown | folders]
        self.paths = {"/".join(each[start:]) for each in parts for start in range(len(each))}
        self.flags = set(re.findall(r"--[a-z][\w-]*", others)) | {"--" + name.replace("_", "-") for name in self.parameters}
        self.flags |= {text for names in self.names.values() for text in names if text.startswith("--")}

    def _read(self, path: str, tree: ast.Module) -> None:
        names, tops = self.names.setdefault(path, set()), self.tops.setdefault(path, set())
        place = PurePath(path)
        self.modules[place.parent.name if place.stem == "__init__" else place.stem].append(path)
        documents = set()
        for node in walk(tree):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                    names.add(name)
                case ast.arg(arg=name):
                    names.add(name)
                    self.parameters.add(name)
                case ast.Constant(value=str(text)) if id(node) not in documents and len(text) < 60:
                    names.update((text, *text.split()))
                    if " " not in text:
                        self.keys.update(NAME.findall(text))
                case ast.Import(names=aliases):
                    self.libraries.update(alias.asname or alias.name for alias in aliases)
                case ast.alias(name=name):
                    names.update(name.split("."))
                case ast.Expr(value=ast.Constant(value=str())):
                    documents.add(id(node.value))
                case ast.FunctionDef(name=name):
                    self.defined.add(name)
                case ast.ClassDef(name=name):
                    self.bases[name] |= {each.id for each in node.bases if isinstance(each, ast.Name)}
                    self.bases[name] |= {each.attr for each in node.bases if isinstance(each, ast.Attribute)}
                    self.members[name] |= set(bound(node.body))
                    on_self = (n for n in walk(node) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name))
                    self.members[name] |= {each.attr for each in on_self if each.value.id == "self"}  # type: ignore[attr-defined]
        tops.update(bound(tree.body))

    def _inherited(self, name: str, seen: set[str]) -> set[str]:
        bases = self.bases[name] & set(self.members) - seen - {name}
        return self.members[name].union(*(self._inherited(base, seen | {name}) for base in bases))

    def has(self, scope: Scope, words: Sequence[str]) -> bool:
        """Whether a class or module has the first of the words, that has the second, and so on."""
        if not words or not scope:
            return bool(scope)
        first, rest = words[0], words[1:]
        if isinstance(scope, str):
            return first in self.members[scope] or first == "__init__"
        for path in scope:
            if first in self.tops[path]:
                if not rest or (first not in self.members and first not in self.modules and rest[0] in self.everything):
                    return True
                if first in self.members and self.has(first, rest):
                    return True
            inside = self.modules.get(first, []) if path.endswith("__init__.py") else []
            if inside and self.has(inside, rest):
                return True
        return False

    def resolves(self, name: str, path: str, local: set[str]) -> bool:
        """Whether a dotted name is one of a class, a module, an object of the file, or of a library."""
        first, *rest = name.split(".")
        if {first, *rest} <= self.keys and (first in STORED or rest[-1].startswith("hook_")):
            return True  # a site, or a column of a dump
        if first in self.libraries - {"rl", "replaylens"}:
            return True  # not looked up: importing them takes longer than all the rest
        if first in ("rl", "replaylens"):
            return self.has(["src/replaylens/__init__.py"], rest) or self.has(self.modules.get(rest[0], ""), rest[1:])
        if first in self.members and self.has(first, rest):
            return True
        if first in self.modules and self.has(self.modules[first], rest):
            return True
        if first in self.members:
            return False
        if first in self.tops.get(path, ()):
            return rest[0] in self.everything
        if path.endswith(".md"):  # a variable of its snippets, or one that a reader has
            return first in local or (first in self.parameters | self.attributes and rest[0] in self.attributes)
        return first in local | HANDLES and rest[0] in self.attributes | local

    def stale(self, text: str, before: str, path: str, local: set[str]) -> bool:
        """Whether a text in backticks says something that is not there.

        before  its line up to it
        local   names of its page or file
        """
        if text in OTHERS or (text in local and not REFERENCE.search(before)):
            return False
        if PLACEHOLDER.search(text) and not text.startswith("replaylens "):
            return False
        if NAME.fullmatch(text):
            return text not in (self.defined if REFERENCE.search(before) else self.everything)
        if PATH.fullmatch(text):
            return text.strip("/") not in self.paths and text not in self.everything
        if DOTTED.fullmatch(text):
            return not self.resolves(text, path, local)
        if text.startswith("--"):
            return text.split()[0] not in self.flags
        if text.startswith(("replaylens ", "make ", "python ")):
            return self.unknown_command(text.split())
        try:
            tree = ast.parse(text, mode="eval")
        except SyntaxError:
            return False  # a formula, a shape, a sentence
        known = self.everything | local | OTHERS
        nodes = list(ast.walk(tree))
        chains = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
        chains = [each for each in chains if DOTTED.fullmatch(each) and each.partition(".")[0] in {"rl", *HANDLES, *self.bases}]
        if not all(self.resolves(each, path, local) for each in chains):
            return True
        said = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        said |= {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
        said |= {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        return not said <= known

    def unknown_command(self, words: list[str]) -> bool:
        if any(word.startswith("--") and word not in self.flags for word in words):
            return True
        match words:
            case ["make", target, *_]:
                return not re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            case ["python", "-m", module, *_]:
                return module.removeprefix("replaylens.").replace(".", "/") not in {
                    path.removesuffix(".py") for path in self.paths
                }
            case ["python", file, *_]:
                return file not in self.paths
        return not words[1].startswith("-") and words[1] not in self.names["src/replaylens/cli.py"]


def bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements bind, in the branches of `if`, `try` and `with` too."""
    for each in body:
        match each:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((alias.asname or alias.name).split(".")[0] for alias in names)
            case ast.If() | ast.Try() | ast.With():
                handlers = [line for handler in getattr(each, "handlers", []) for line in handler.body]
                yield from bound([*each.body, *getattr(each, "orelse", []), *getattr(each, "finalbody", []), *handlers])


@cache
def code() -> Code:
    folders = {*ROOMS, *OTHER_ROOMS}
    files = [path.name for path in ROOT.iterdir() if path.is_file()]
    files += [
        path.relative_to(ROOT).as_posix() for each in sorted(folders) for path in (ROOT / each).rglob("*") if path.is_file()
    ]
    files = [file for file in files if "__pycache__" not in file]
    mine = [file for file in files if file.endswith(".py") and file.startswith(ROOMS)]
    others = [file for file in files if file.endswith(".py") and file not in mine]
    others.remove("tests/docs/test_words.py")  # whose controls are not there
    return Code(
        {file: (ROOT / file).read_text(encoding="utf-8") for file in mine},
        files,
        "\n".join((ROOT / file).read_text(encoding="utf-8") for file in others),
    )


def findings(path: str, text: str) -> list[str]:
    """What a file or page says and is not there, as PATH:LINE: TEXT."""
    known, page = code(), path.endswith(".md")
    local = set(known.names.get(path, ()))
    if page:
        local = {word for block in blocks(path, text) for word in NAME.findall(block.text)}
        text = re.sub(r"^```.*?^```$", lambda fence: "\n" * fence[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        for span in SPAN.finditer(line):
            if (page or "{" not in span[1]) and known.stale(span[1], line[: span.start()], path, local):
                found.append(f"{path}:{number}: {span[1]}")
    for node in walk(parsed(text)) if not page else ():
        if isinstance(node, ast.Raise):
            said = " ".join(str(each.value) for each in walk(node) if isinstance(each, ast.Constant))
            names = [name for name in OF_OURS.findall(said) if not known.resolves(name, path, local)]
            found += [f"{path}:{node.lineno}: {name}" for name in names if name not in OTHERS]
    return found


@pytest.mark.parametrize("room", [*ROOMS, "pages"])
def test_what_is_named_exists(room: str) -> None:
    paths = PAGES if room == "pages" else [path for path in code().names if path.startswith(room)]
    found = [each for path in paths for each in findings(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert paths and not found, "\n".join(found)


def test_the_list_of_other_words_is_needed() -> None:
    """Each word on it stands in backticks somewhere, and the code does not define it."""
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in [*code().names, *PAGES]}
    said = {span for text in texts.values() for span in SPAN.findall(text)}
    assert OTHERS - said == set()
    assert {word for word in OTHERS if NAME.fullmatch(word) and word in code().defined} == set()


STALE = (
    "`engine/loop/turn.py`", "`torch_ops.py`", "as `information` says", "`metrics.auroc`", "`Loop.leap`", "`rl.lensing`",
    "`rl.probes.swept(run)`", "`--no-such-option`", "`replaylens replays`", "`make coffee`",
    "`python -m replaylens.engine.queue`",
    "`branch.bifurcate(2)`", "`docs/queue.md`", "`no_such_name`", "`readout.read`", "See `information` for it",
)  # fmt: skip
LIVE = (
    "`engine/loop/lane.py`", "`cpu.py`", "as `smoothed` does", "`intervals.auroc`", "`Loop.step`", "`rl.lens`",
    "`rl.probes.sweep(run)`", "`--drafter`", "`replaylens replay`", "`make test`", "`python -m replaylens.extras.ranks`",
    "`branch.fork(2)`", "`docs/probes.md`", "`generate`", "`lens.read`", "`x + 1 = 2`", "`blocks.12.hook_in`", "`Z.top_ids`",
    "`torch.equal`",
)  # fmt: skip


@pytest.mark.parametrize("text", STALE)
def test_control(text: str) -> None:
    """Negative control: what is not there is found, in a docstring as on a page."""
    assert findings("docs/planted.md", text) and findings("engine/loop/loop.py", f'"""{text}"""')


@pytest.mark.parametrize("text", LIVE)
def test_what_is_there_passes(text: str) -> None:
    assert not findings("docs/planted.md", text) and not findings("engine/loop/loop.py", f'"""{text}"""')


def test_an_error_text_is_read_without_backticks() -> None:
    source = 'raise ValueError(f"{{given}}: use tasks.{0}.Knobs")\n'
    assert findings("tasks/registry.py", source.format("knobs")) and not findings("tasks/registry.py", source.format("task"))
