"""The house: how large each room may be, and the drawing of its floors, which is made from the imports.

python -m tests.test_house      writes the drawing into docs/architecture.md, and prints files and lines of every room
"""

import os
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.test_imports import FACES, PACKAGE, ROOT, SHELF, imports, modules, room_of

PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- the house: written by python -m tests.test_house -->\n", "<!-- the house ends -->\n"
SIZES = "tool.replaylens.budget"
"""table of pyproject.toml: room -> most files, most lines. Raising one is a line in a commit that says what it buys"""
FOLDERS = ("tests", "bench")
"""measured as a whole, beside the package's rooms"""


@cache
def package() -> dict[str, Path]:
    """The package's files with something in them."""
    return {module: file for module, file in modules().items() if file.stat().st_size}


def part_of(module: str) -> str:
    """What has a budget of its own: the engine as a whole, another linked folder, a room of the shelf, the extras."""
    return module.split(".")[1] if "." in module else "__init__"


def sizes() -> dict[str, tuple[int, int]]:
    """Files and lines of each part."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for module, file in package().items():
        part = part_of(module) if file.parent.name != "replaylens" else "files beside"
        files[part] += 1
        lines[part] += len(file.read_text(encoding="utf-8").splitlines())
    for folder in FOLDERS:
        found = sorted((ROOT / folder).rglob("*.py"))
        files[folder] = len(found)
        lines[folder] = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in found)
    return {part: (files[part], lines[part]) for part in files}


def over(found: dict[str, tuple[int, int]], allowed: dict[str, list[int]]) -> list[str]:
    """What a person is told of a room that is new, gone or too large."""
    said = [f"{part}: no budget in pyproject.toml ({SIZES})" for part in found.keys() - allowed.keys()]
    said += [f"{part}: it has a budget, and is gone" for part in allowed.keys() - found.keys()]
    for part in found.keys() & allowed.keys():
        for have, most, what in zip(found[part], allowed[part], ("files", "lines"), strict=True):
            if have > most:
                said.append(f"{part}: {have} {what}, {most} allowed")
    return sorted(said)


def budget() -> dict[str, list[int]]:
    table: dict[str, list[int]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["replaylens"][
        "budget"
    ]
    return table


# ---- the drawing -----------------------------------------------------------------------------------------------------


def arrows(texts: dict[str, str]) -> dict[str, set[str]]:
    """Room -> the rooms that it imports when it is loaded."""
    found: dict[str, set[str]] = {room_of(module): set() for module in texts}
    for module, text in texts.items():
        for name in imports(text).at_top:
            if name.startswith("replaylens.") and (other := room_of(name)) in found and other != room_of(module):
                found[room_of(module)].add(other)
    return found


def floors(found: dict[str, set[str]]) -> dict[str, int]:
    """Room -> its floor: one above the highest of the rooms that it imports."""

    @cache
    def floor(room: str) -> int:
        return 1 + max((floor(other) for other in found[room]), default=0)

    return {room: floor(room) for room in found}


def drawing() -> str:
    """The rooms of the spine floor by floor, then shelf and faces, with files and lines."""
    texts = {module: file.read_text(encoding="utf-8") for module, file in package().items() if file.name != "__init__.py"}
    files, lines = Counter(room_of(module) for module in texts), Counter[str]()
    for module, text in texts.items():
        lines[room_of(module)] += len(text.splitlines())
    faces = {room for rooms in FACES for room in rooms}
    at = floors(arrows(texts))

    def told(room: str) -> str:
        name = room.removeprefix("engine/")
        return f"{name} {lines[room] / 1000:.1f}k"

    drawn = []
    for floor in range(max(at.values()), 0, -1):
        rooms = sorted(room for room in at if at[room] == floor)
        spine = "   ".join(told(room) for room in rooms if room not in faces and room not in SHELF)
        beside = "   ".join(told(room) for room in rooms if room in SHELF)
        people = "   ".join(told(room) for room in rooms if room in faces)
        drawn.append(f"{floor:2}  {spine:<62}{beside:<34}{people}".rstrip())
    head = f"{'':4}{'the engine (engine/, kernels/, tasks/)':<62}{'the shelf':<34}{'faces'}"
    total = sum(lines[room] for room in lines if room.startswith("engine/"))
    count = sum(n for room, n in files.items() if room.startswith("engine/"))
    engine = f"engine/: {count} files, {total / 1000:.1f}k lines"
    return "\n".join(["```", head, *drawn, "", engine, "```"]) + "\n"


def written(page: str, drawn: str) -> str:
    before, _, rest = page.partition(BEGIN)
    assert rest, f"{PAGE} has no line {BEGIN}"
    return before + BEGIN + drawn + END + rest.partition(END)[2]


# ---- the promises ----------------------------------------------------------------------------------------------------


def test_every_room_keeps_its_budget() -> None:
    assert over(sizes(), budget()) == []


@pytest.mark.parametrize(
    "found, allowed, said",
    [
        ({"loop": (2, 10)}, {"loop": [2, 9]}, ["loop: 10 lines, 9 allowed"]),
        ({"loop": (3, 10)}, {"loop": [2, 10]}, ["loop: 3 files, 2 allowed"]),
        ({"loop": (2, 10), "attic": (1, 1)}, {"loop": [2, 10]}, [f"attic: no budget in pyproject.toml ({SIZES})"]),
        ({}, {"loop": [2, 10]}, ["loop: it has a budget, and is gone"]),
        ({"loop": (2, 10)}, {"loop": [2, 10]}, []),
    ],
)
def test_what_is_too_large_is_named(found: dict[str, tuple[int, int]], allowed: dict[str, list[int]], said: list[str]) -> None:
    """Negative control, and a room just as large as it may be."""
    assert over(found, allowed) == said


def test_the_drawing_is_of_today() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page, drawing()) == page, "stale: run python -m tests.test_house"


def test_a_new_import_moves_a_room_up() -> None:
    """Negative control: the drawing follows the imports."""
    texts = {"replaylens.engine.loop.loop": "import torch\n", "replaylens.engine.memory.pages": "import torch\n"}
    assert floors(arrows(texts)) == {"engine/loop": 1, "engine/memory": 1}
    texts["replaylens.engine.loop.loop"] += "from replaylens.engine.memory.pages import Pages\n"
    assert floors(arrows(texts)) == {"engine/loop": 2, "engine/memory": 1}


# ---- what can be left out --------------------------------------------------------------------------------------------

WITHOUT = """
import sys, pkgutil, importlib, pathlib, warnings
import replaylens as rl
from replaylens.engine.errors import EngineError
assert pathlib.Path(rl.__file__).parent.parent == pathlib.Path(sys.argv[1])
left = [m.name for m in pkgutil.walk_packages(rl.__path__, "replaylens.", onerror=lambda name: None)]
assert len(left) > 200
for name in left:
    if not name.endswith("__main__") and not name.startswith(SKIPPED):
        importlib.import_module(name)
engine = rl.Engine.load("coin-plain")
run = engine.replay(rl.tasks.get("coin")(flips=2).examples(12), sites="STCZ")
dump = run.save(sys.argv[1] + "/dump")
rl.probes.fit_probe(dump, "face", layer=1)
branch = engine.prompt("A coin's state is heads. Alice flips,")
branch.fork()[0].generate(3)
rl.lens(engine, "A coin's state is heads. Alice flips,")
def refused(call):
    try:
        call()
    except EngineError as error:
        print(type(error).__name__, error)
    else:
        raise SystemExit("nothing was refused")
REFUSED
"""
LEFT_OUT = {
    "extras": (
        "'?'",
        'refused(lambda: rl.attribution_graph(engine, "x"))\nrefused(lambda: rl.Engine.load("coin-plain", ranks=2))',
        "replaylens.extras",
    ),
    "thinking": (
        '("replaylens.training", "replaylens.commands.train", "replaylens.extras")',
        'refused(lambda: rl.Engine.load("coin-thinking"))',
        "replaylens.thinking",
    ),
}
"""folder -> modules that need it, what is refused without it, and the name that the refusal says"""


FORKED = """
import os, sys, numba, pandas, pyarrow.parquet, scipy.stats, sklearn.linear_model, torch
for place in sys.argv[1:]:
    if not os.fork():  # it has loaded nothing of ours
        sys.path.insert(0, place)
        sys.argv[1:], sys.stdout = [place], open(place + "/said", "w")
        exec(open(place + "/script").read())
        sys.stdout.close()
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def said_without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folder -> what is printed in a package that has everything else. Links, since compiled kernels of a copy would take 20 s;
    one process, which loads the libraries once."""
    places = {folder: tmp_path_factory.mktemp(folder) for folder in LEFT_OUT}
    for folder, place in places.items():
        (place / "replaylens").mkdir()
        for part in PACKAGE.iterdir():
            if part.name not in (folder, "__pycache__"):
                (place / "replaylens" / part.name).symlink_to(part.resolve())
        needing, refused, _ = LEFT_OUT[folder]
        (place / "script").write_text(WITHOUT.replace("SKIPPED", needing).replace("REFUSED", refused))
    command, env = [sys.executable, "-c", FORKED, *map(str, places.values())], os.environ | {"PYTHONPATH": ""}
    done = subprocess.run(command, env=env, cwd=places["extras"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {folder: (place / "said").read_text() for folder, place in places.items()}


@pytest.mark.parametrize("folder", LEFT_OUT)
def test_the_rest_works_without(folder: str, said_without: dict[str, str]) -> None:
    _, refused, named = LEFT_OUT[folder]
    lines = said_without[folder].splitlines()
    assert all(named in line for line in lines) and len(lines) == refused.count("refused(")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), drawing()), encoding="utf-8")
    for part, (files, lines) in sorted(sizes().items()):
        sys.stdout.write(f"{part:14} = [{files}, {lines}]\n")
