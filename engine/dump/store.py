"""`Store`: one folder, local or behind fsspec, that holds a dump's files by name.

A local file is written under a temporary name, flushed to the disk and renamed: its name never shows half a file. A
store without renames (object stores, memory) gets the file in one upload; the manifest comes last in both.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from replaylens.engine.errors import BadDump, BadRequest, DumpWriteFailed

TEMPORARY = ".tmp"
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")


class HashingFile:
    """A file being written that knows the size and the SHA-256 of what went in."""

    closed = False  # what pyarrow asks of a file

    def __init__(self, raw: IO[bytes]) -> None:
        self.raw, self.num_bytes, self._hash = raw, 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        """Mutates: append bytes."""
        data = memoryview(data).cast("B")
        self.raw.write(data)
        self._hash.update(data)
        self.num_bytes += len(data)
        return len(data)

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self.raw.flush()

    def close(self) -> None:
        """Closing is the store's business."""

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


class Store:
    """Files of one folder. Names are plain: no folders below, nothing outside."""

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise BadRequest(f"path={path!r:.60}: give a folder, or the address of one that fsspec knows")
        self.url = str(path)
        try:
            self.fs, root = url_to_fs(self.url)
        except (ValueError, ImportError) as error:  # no such protocol, or not installed
            raise BadRequest(f"path={self.url!r:.60}: {error}") from error
        self.root = str(root).rstrip("/")
        self.local = isinstance(self.fs, LocalFileSystem)

    def path(self, name: str) -> str:
        """Where a file lies; BadDump for a name that would leave the folder."""
        if not _NAME.fullmatch(name):
            raise BadDump(f"{name!r} is not the name of a file of a dump")
        return f"{self.root}/{name}"

    def make(self) -> None:
        """Create the folder if it is not there."""
        try:
            self.fs.makedirs(self.root, exist_ok=True)
        except OSError as error:
            raise DumpWriteFailed(f"cannot create {self.url}: {error.strerror or error}") from error

    def sizes(self) -> dict[str, int]:
        """Name and size of every file, by one listing; empty where there is no folder."""
        self.fs.invalidate_cache()
        try:
            listed = self.fs.ls(self.root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, UnicodeError) as error:  # a name that no file system takes, no permission
            raise BadDump(f"{self.url[:200]!r} cannot be listed: {error}") from error
        return {str(entry["name"]).rsplit("/", 1)[-1]: int(entry["size"] or 0) for entry in listed if entry["type"] == "file"}

    def exists(self, name: str) -> bool:
        return bool(self.fs.exists(self.path(name)))

    def read(self, name: str, most: int) -> bytes:
        """A whole small file; BadDump where it is missing or larger than `most`."""
        path = self.path(name)
        try:
            size = int(self.fs.size(path))
            if size > most:
                raise BadDump(f"{self.url}/{name} has {size} bytes; more than {most} are absurd for it")
            return bytes(self.fs.cat_file(path))
        except FileNotFoundError:
            raise BadDump(f"{self.url} has no {name}") from None

    def read_range(self, name: str, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path(name), start=start, end=end))

    def sha256(self, name: str) -> str:
        """Hash of a file as it lies there, read in blocks."""
        with self.fs.open(self.path(name), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @contextmanager
    def writing(self, name: str) -> Iterator[HashingFile]:
        """A file that is there, whole, once the block ends without an error, and not there (or the old one) otherwise."""
        path = self.path(name)
        hidden = path + TEMPORARY if self.local else path
        try:
            with self.fs.open(hidden, "wb") as raw:
                try:
                    yield HashingFile(raw)
                    if self.local:
                        raw.flush()
                        os.fsync(raw.fileno())
                except BaseException:
                    if not self.local:
                        _discard(raw)
                    raise
            if self.local:
                os.replace(hidden, path)
                _sync_folder(self.root)
        except BaseException as error:
            if self.local:
                with suppress(OSError):
                    os.unlink(hidden)
            if isinstance(error, OSError) and not isinstance(error, DumpWriteFailed):
                raise DumpWriteFailed(
                    f"cannot write {self.url}/{name}: {error.strerror or error}. The shards written so far are whole: "
                    f"make room and resume"
                ) from error
            raise

    def write(self, name: str, data: bytes) -> None:
        """A whole file at once."""
        with self.writing(name) as file:
            file.write(data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file only if there is none of this name; whether it was written. Atomic where the store can do it."""
        path = self.path(name)
        if not self.local:
            try:
                self.fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            return True
        hidden = f"{path}.{os.getpid()}{TEMPORARY}"
        try:
            Path(hidden).write_bytes(data)
            os.link(hidden, path)
        except FileExistsError:
            return False
        except OSError as error:
            raise DumpWriteFailed(f"cannot write {self.url}/{name}: {error.strerror or error}") from error
        finally:
            with suppress(OSError):
                os.unlink(hidden)
        return True

    def remove(self, name: str) -> None:
        """Delete a file; nothing happens where there is none."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))


def _discard(raw: Any) -> None:
    """Drop a half-done upload, for file systems that can."""
    with suppress(Exception):
        raw.discard()


def _sync_folder(path: str) -> None:
    """After a rename, the folder itself must reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
