"""`Store`: one folder, local or on any fsspec file system, that holds a dump's files by name.

A local file is written under a temporary name, flushed to the disk and renamed, so that an incomplete file never has the
final name. A store without renames (object stores, memory) receives the file in one upload.
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
    """A file being written, with the size and SHA-256 of its content so far."""

    closed = False  # pyarrow reads this attribute

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
        """Does nothing: the store closes the file."""

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


class Store:
    """The files of one folder, without subfolders."""

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
        """The path of a file; BadDump for a name that could point outside the folder."""
        if not _NAME.fullmatch(name):
            raise BadDump(f"{name!r} is not a valid name for a file of a dump.")
        return f"{self.root}/{name}"

    def make(self) -> None:
        """Create the folder if it does not exist."""
        try:
            self.fs.makedirs(self.root, exist_ok=True)
        except OSError as error:
            raise DumpWriteFailed(f"Cannot create {self.url}: {error.strerror or error}.") from error

    def sizes(self) -> dict[str, int]:
        """Name and size of every file, from one listing; empty if there is no folder."""
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
        """The content of a small file; BadDump if it is missing or larger than `most`."""
        path = self.path(name)
        try:
            size = int(self.fs.size(path))
            if size > most:
                raise BadDump(f"{self.url}/{name} has {size} bytes, more than the limit of {most}.")
            return bytes(self.fs.cat_file(path))
        except FileNotFoundError:
            raise BadDump(f"{self.url} has no {name}.") from None

    def read_range(self, name: str, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path(name), start=start, end=end))

    def sha256(self, name: str) -> str:
        """SHA-256 of a stored file, read in blocks."""
        with self.fs.open(self.path(name), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @contextmanager
    def writing(self, name: str) -> Iterator[HashingFile]:
        """A file that appears, complete, when the block ends without an error. Otherwise nothing changes."""
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
                    f"Cannot write {self.url}/{name}: {error.strerror or error}. The shards written so far are complete. Free "
                    f"some space and resume."
                ) from error
            raise

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file."""
        with self.writing(name) as file:
            file.write(data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless the name exists. Returns whether it was written. Atomic if the store supports it."""
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
            raise DumpWriteFailed(f"Cannot write {self.url}/{name}: {error.strerror or error}.") from error
        finally:
            with suppress(OSError):
                os.unlink(hidden)
        return True

    def remove(self, name: str) -> None:
        """Delete a file, if it exists."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))


def _discard(raw: Any) -> None:
    """Abort an upload, on file systems that support it."""
    with suppress(Exception):
        raw.discard()


def _sync_folder(path: str) -> None:
    """Flush the folder to the disk, which makes a rename durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
