"""Files on a local disk: each appears whole or not at all, and replaces nothing but what replaylens wrote.

Dumps, rollouts, reports, probes, lenses, figures, boards and pages are written here. A file is written under a temporary name,
flushed to the disk and renamed, and then its folder is flushed. Whoever is stopped on the way, by a full disk, a failing one or
a kill, leaves the older file as it was.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import IO

from replaylens.engine.errors import BadRequest, DumpWriteFailed

TEMPORARY, WAITING = ".tmp", ".next"
AGAIN = "What was there before is as it was. Make room, or give another path, and save it again."
Ours = Callable[[bytes], bool]
"""whether the content of a file is one that we wrote"""


# ---- one file --------------------------------------------------------------------------------------------------------


def hidden_name(path: str | Path) -> str:
    """A temporary name that no other writer uses: one that was given up for dead may still write the same file."""
    return f"{path}.{os.getpid()}-{uuid.uuid4().hex[:8]}{TEMPORARY}"


@contextmanager
def appearing(path: str | Path, hidden: str | Path | None = None) -> Iterator[IO[bytes]]:
    """A file to write, which has its name once the block ends without an error. Otherwise nothing changes. Raises OSError.

    hidden  its name until then, in the same folder
    """
    hidden = hidden_name(path) if hidden is None else hidden
    with _prepared(hidden) as raw:
        yield raw
        _flushed(raw)
        os.replace(hidden, path)
    sync_folder(os.path.dirname(os.path.abspath(path)))


@contextmanager
def appearing_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill, which has its name once the block ends without an error. Otherwise nothing is left. DumpWriteFailed if
    the disk refuses. There must be no folder of this name, or an empty one.
    """
    goal = Path(path).resolve()
    hidden = Path(hidden_name(goal))
    with failing() as at:
        at[0] = goal
        hidden.mkdir(parents=True)
        try:
            yield hidden
            os.replace(hidden, goal)
        except BaseException:
            rmtree(hidden, ignore_errors=True)
            raise
        sync_folder(goal.parent)


@contextmanager
def _prepared(hidden: str | Path) -> Iterator[IO[bytes]]:
    """A new file to write. It is removed if the block fails."""
    try:
        with open(hidden, "xb") as raw:
            yield raw
    except BaseException:
        with suppress(OSError):
            os.unlink(hidden)
        raise


def _flushed(raw: IO[bytes]) -> None:
    raw.flush()
    os.fsync(raw.fileno())


def sync_folder(path: str | Path) -> None:
    """Flush the folder to the disk, which makes a rename durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- own files -------------------------------------------------------------------------------------------------------


def require_own(path: str | Path, ours: Ours) -> None:
    """BadRequest if there is a file that is not ours. Nor is an empty one: whoever made it may want to write to it."""
    there = Path(path)
    if there.exists() and not (there.is_file() or there.is_dir()):  # reading a device or a pipe may never end
        raise BadRequest(f"{str(path)[:200]} is a device or a pipe, not a file. Give another path.")
    try:
        content = there.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadRequest(f"Cannot write to {str(path)[:200]}: {error.strerror}. Give another path.") from error
    if not ours(content):
        raise BadRequest(f"{str(path)[:200]} is a file that replaylens did not write. Give another path.")


def require_own_folder(path: str | Path, ours: Callable[[Path], bool]) -> None:
    """BadRequest if a folder holds something, and is not ours. What a stopped writer left there is nobody's."""
    folder = Path(path)
    there = sorted(name for name in os.listdir(folder) if not name.endswith((TEMPORARY, WAITING))) if folder.is_dir() else []
    if there and not ours(folder):
        raise BadRequest(
            f"{str(path)[:200]} holds {there[0][:100]!r}, and nothing that this call wrote before. Give a new or an empty "
            "folder."
        )


def write_file(path: str | Path, content: bytes | str, ours: Ours | None = None, advice: str = AGAIN) -> Path:
    """Write a whole file, and its folder if there is none. A link is followed. Returns the path.

    ours    whether an older file may be replaced: BadRequest if not. None: every file of this name is ours
    advice  what DumpWriteFailed says after the reason
    """
    write_together({Path(path): content}, ours, advice)
    return Path(path)


def write_together(files: Mapping[Path, bytes | str], ours: Ours | None = None, advice: str = AGAIN) -> None:
    """Write files that belong together. None is replaced before all of them are on the disk; the last one is replaced last.

    Arguments as in `write_file`.
    """
    if ours is not None:
        for path in files:
            require_own(path, ours)
    with ExitStack() as left, failing(advice) as at:
        hidden = dict[Path, str]()
        for path, content in files.items():
            at[0] = path
            path.parent.mkdir(parents=True, exist_ok=True)
            goal = path.resolve()
            hidden[goal] = hidden_name(goal)
            raw = left.enter_context(_prepared(hidden[goal]))
            raw.write(content.encode() if isinstance(content, str) else content)
            _flushed(raw)
        for goal, name in hidden.items():
            at[0] = goal
            os.replace(name, goal)
        for folder in {goal.parent for goal in hidden}:
            sync_folder(folder)


@contextmanager
def failing(advice: str = AGAIN) -> Iterator[list[Path]]:
    """Turn what the disk refuses into DumpWriteFailed. The yielded list holds the path that is being written."""
    at = [Path()]
    try:
        yield at
    except OSError as error:
        if isinstance(error, DumpWriteFailed):
            raise
        raise DumpWriteFailed(f"Cannot write {str(at[0])[:200]}: {error.strerror or error}. {advice}") from error


# ---- a record and its data -------------------------------------------------------------------------------------------
# A small record that tells the hash of a large file beside it. The data waits under a name of its own until the record is
# there, so that wherever a writer is stopped, a reader finds both of the older save, or both of the newer one.


def require_own_pair(record: Path, data: Path, ours: Ours) -> None:
    """BadRequest if there is a record that is not ours, or data without a record."""
    require_own(record, ours)
    require_own(data, lambda content: record.is_file())


def write_pair(record: Path, content: str, data: Path, body: bytes, ours: Ours) -> None:
    """Write both. BadRequest as `require_own_pair`."""
    require_own_pair(record, data, ours)
    waiting = data.with_name(f"{data.name}.{hashlib.sha256(body).hexdigest()[:16]}{WAITING}")
    write_file(waiting, body)
    try:
        write_file(record, content)
    except DumpWriteFailed:
        if not (record.is_file() and record.read_bytes() == content.encode()):  # it failed after it was replaced
            waiting.unlink(missing_ok=True)
        raise
    with failing() as at:
        at[0] = data
        os.replace(waiting, data)
        sync_folder(data.parent)
        for other in saves_of(data)[1:]:
            other.unlink(missing_ok=True)


def saves_of(data: Path) -> list[Path]:
    """Where the data of a record can be: in its file, or, if a save was stopped, in one that waits."""
    try:
        names = sorted(name for name in os.listdir(data.parent) if name.startswith(f"{data.name}.") and name.endswith(WAITING))
    except OSError:
        names = []
    return [data, *(data.with_name(name) for name in names)]


# ---- own folder ------------------------------------------------------------------------------------------------------

CACHE_VARIABLE = "REPLAYLENS_CACHE"


def cache_folder() -> Path:
    """$REPLAYLENS_CACHE, or replaylens/ in the user's cache folder."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "replaylens")
