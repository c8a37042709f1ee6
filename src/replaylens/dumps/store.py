"""`Store`: one folder, local or on any fsspec file system, that holds a dump's files by name.

A local file is written under a temporary name, flushed to the disk and renamed, so that an incomplete file never has the
final name. A store without renames (object stores, memory) receives the file in one upload.

Every file system raises errors of its own. All of them become StoreFailed, except for files that are missing.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fsspec.core import split_protocol, url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import available_protocols, registry

from replaylens.engine.errors import BadDump, BadRequest, DumpWriteFailed, EngineError, StoreFailed
from replaylens.engine.files import appearing, hidden_name
from replaylens.engine.request.values import output_path

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")


_FLUSHED = 1 << 26
"""bytes of a local file that are worth a flush"""


class HashingFile:
    """A file being written, with the size and SHA-256 of its content so far.

    threads  flushes what was written, some at a time, while more is: else the disk has nothing to do until a file ends
    """

    closed = False  # pyarrow reads this attribute

    def __init__(self, raw: IO[bytes], threads: ThreadPoolExecutor | None = None) -> None:
        self.raw, self.num_bytes, self._hash = raw, 0, hashlib.sha256()
        self._threads, self._flushed, self._flush = threads, 0, Future[None]()
        self._flush.set_result(None)

    def write(self, data: Any) -> int:
        """Mutates: append bytes."""
        data = memoryview(data).cast("B")
        with _as_os_errors():
            self.raw.write(data)
        self._hash.update(data)
        self.num_bytes += len(data)
        if self._threads is not None and self.num_bytes - self._flushed >= _FLUSHED and self._flush.done():
            self.settle()
            self._flushed, self._flush = self.num_bytes, self._threads.submit(os.fsync, self.raw.fileno())
        return len(data)

    def settle(self) -> None:
        """Wait for the flush under way. Raises its error, which the system tells only once."""
        self._flush.result()

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
        self.fs, root = _opened(self.url)
        self.root = str(root).rstrip("/")
        self.local = isinstance(self.fs, LocalFileSystem)

    def apart(self) -> "Store":
        """The same folder over a connection of its own, for another thread."""
        other = Store(self.url)
        other.fs, _ = _opened(self.url, skip_instance_cache=not self.local)
        return other

    @contextmanager
    def reaching(self, doing: str) -> Iterator[None]:
        """Turn errors of the file system into StoreFailed. A file that is missing, or exists already, is no failure."""
        try:
            yield
        except (EngineError, FileNotFoundError, NotADirectoryError, FileExistsError):
            raise
        except IsADirectoryError as error:
            raise BadDump(f"{error.filename or self.url} is a folder, where a file of a dump belongs. Move it away.") from error
        except Exception as error:  # libraries of stores have error classes of their own
            raise self.failed(doing, error) from error

    def failed(self, doing: str, error: Exception) -> StoreFailed:
        checked = "the path and its permissions" if self.local else "address, network, credentials and permissions"
        return StoreFailed(f"Cannot {doing} {self.url[:200]}: {_said(error)}. Check {checked}.")

    def path(self, name: str) -> str:
        """The path of a file; BadDump for a name that could point outside the folder."""
        if not _NAME.fullmatch(name):
            raise BadDump(f"{name!r} is not a valid name for a file of a dump.")
        return f"{self.root}/{name}"

    def require_writable(self) -> None:
        """BadRequest if a folder of this machine cannot be made or written. Leaves nothing."""
        if self.local:
            output_path(self.root, folder=True)

    def make(self) -> None:
        """Create the folder if it does not exist, but not a bucket: that would hide a mistyped name.

        Where paths have no leading slash, their first part is a bucket, or something else that only its owner creates.
        """
        self.require_writable()
        try:
            if self._has_bucket():
                self.fs.makedirs(self.root, exist_ok=True)
        except Exception as error:  # as in `reaching`
            raise DumpWriteFailed(f"Cannot create {self.url}: {_said(error)}.") from error

    def _has_bucket(self) -> bool:
        return self.root.startswith("/") or self.local or bool(self.fs.exists(self.root.split("/")[0]))

    def require_folder(self) -> None:
        """Raise BadDump if there is no such folder, StoreFailed if there is not even its bucket."""
        if self.has_folder():
            return
        with self.reaching("find"):
            if not self._has_bucket():
                raise StoreFailed(f"{self.url[:200]}: there is no bucket {self.root.split('/')[0]!r}. Check the address.")
        raise BadDump(f"{self.url[:200]} does not exist. Check the path.")

    def has_folder(self) -> bool:
        with self.reaching("find"):
            return bool(self.fs.exists(self.root))

    def remove_folder(self) -> None:
        """Delete the folder if it is empty."""
        if self.local or self.root.startswith("/"):  # elsewhere, there are no folders without files
            with suppress(OSError), self.reaching("remove"):
                self.fs.rmdir(self.root)

    def names(self) -> list[str]:
        """Name of every file and folder; empty if there is no folder."""
        try:
            with self.reaching("list"):
                if self.local:
                    return os.listdir(self.root)
                self.fs.invalidate_cache()
                listed = [str(path).rstrip("/") for path in self.fs.ls(self.root, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [path.rsplit("/", 1)[-1] for path in listed if path != self.root]  # some stores list the folder itself

    def sizes(self) -> dict[str, int]:
        """Name and size of every file, from one listing; empty if there is no folder. A link counts as the file it leads to."""
        try:
            with self.reaching("list"):
                if self.local:
                    return _local_sizes(self.root)
                self.fs.invalidate_cache()
                listed = self.fs.ls(self.root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except StoreFailed as error:
            if self.local and not isinstance(error.__cause__, PermissionError):  # a name that no file system takes
                raise BadDump(f"{self.url[:200]!r} cannot be listed: {error.__cause__}") from error
            raise
        kinds = ("file", "link")
        return {str(entry["name"]).rsplit("/", 1)[-1]: int(entry["size"] or 0) for entry in listed if entry["type"] in kinds}

    def exists(self, name: str) -> bool:
        try:
            with self.reaching("read"):
                return bool(self.fs.info(self.path(name)))  # fs.exists takes a store out of reach for an empty one
        except (FileNotFoundError, NotADirectoryError):
            return False

    def size(self, name: str) -> int:
        with self.reaching("read"):
            return int(self.fs.size(self.path(name)))

    def open(self, name: str) -> Any:
        """A file, to be read in binary mode."""
        with self.reaching("read"):
            return self.fs.open(self.path(name), "rb")

    def peek(self, name: str) -> bytes | None:
        """The content of a small file; None if it is missing."""
        try:
            with self.reaching("read"):
                return bytes(self.fs.cat_file(self.path(name)))
        except FileNotFoundError:
            return None

    def read(self, name: str, most: int) -> bytes:
        """The content of a small file; BadDump if it is missing or larger than `most`."""
        try:
            size = self.size(name)
            if size > most:
                raise BadDump(f"{self.url}/{name} has {size} bytes, more than the limit of {most}.")
            with self.reaching("read"):
                return bytes(self.fs.cat_file(self.path(name)))
        except FileNotFoundError:
            raise BadDump(f"{self.url} has no {name}.") from None

    def read_range(self, name: str, start: int, end: int) -> bytes:
        with self.reaching("read"):
            return bytes(self.fs.cat_file(self.path(name), start=start, end=end))

    def sha256(self, name: str) -> str:
        """SHA-256 of a stored file, read in blocks."""
        with self.reaching("read"), self.fs.open(self.path(name), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @contextmanager
    def writing(self, name: str) -> Iterator[HashingFile]:
        """A file that appears, complete, when the block ends without an error. Otherwise nothing changes."""
        path = self.path(name)
        try:
            if self.local:
                with appearing(path) as raw, ThreadPoolExecutor(1, "dump-flush") as threads:
                    yield (file := HashingFile(raw, threads))
                    file.settle()
            else:
                with self._writable(path) as raw:
                    yield HashingFile(raw)
        except EngineError:
            raise
        except OSError as error:
            folder = isinstance(error, IsADirectoryError)
            advice = "Move that folder away" if folder else "Make room" if self.local else "Restore the connection"
            raise DumpWriteFailed(
                f"Cannot write {self.url}/{name}: {_said(error)}. The shards written so far are complete. {advice}, and resume."
            ) from error

    @contextmanager
    def _writable(self, path: str) -> Iterator[Any]:
        """An open file, closed when the block ends. If it fails, the upload is aborted, on file systems that support it."""
        with _as_os_errors():
            raw = self.fs.open(path, "wb")
        try:
            yield raw
        except BaseException:
            with suppress(Exception):
                raw.discard()
            with suppress(Exception):
                raw.close()
            raise
        with _as_os_errors():
            raw.close()

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file."""
        with self.writing(name) as file:
            file.write(data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless the name exists. Returns whether it was written. Atomic if the store supports it."""
        path = self.path(name)
        if not self.local:
            try:
                with _as_os_errors():
                    self.fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                raise DumpWriteFailed(f"Cannot write {self.url}/{name}: {_said(error)}.") from error
            return True
        hidden = hidden_name(path)
        try:
            Path(hidden).write_bytes(data)
            os.link(hidden, path)
        except FileExistsError:
            return False
        except OSError as error:
            raise DumpWriteFailed(f"Cannot write {self.url}/{name}: {_said(error)}.") from error
        finally:
            with suppress(OSError):
                os.unlink(hidden)
        return True

    def remove(self, name: str) -> None:
        """Delete a file, if it exists."""
        with suppress(FileNotFoundError), self.reaching("remove a file of"):
            self.fs.rm_file(self.path(name))


def _opened(url: str, **options: bool) -> tuple[Any, str]:
    """The file system of an address, and the path on it."""
    for link in url.split("::"):  # simplecache::s3://bucket
        scheme = split_protocol(link)[0]
        if scheme is None or scheme in available_protocols() or scheme in registry:
            continue
        raise BadRequest(f"path={url!r:.60}: Protocol not known: {scheme}. Known: {', '.join(sorted(available_protocols()))}.")
    try:
        return url_to_fs(url, **options)
    except ImportError as error:
        raise StoreFailed(f"{url[:200]} needs a package that is not installed: {_said(error)}. Install it with pip.") from error
    except Exception as error:  # as in `reaching`: file systems connect when they are made
        raise StoreFailed(f"Cannot reach {url[:200]}: {_said(error)}. Check address, network and credentials.") from error


def _local_sizes(folder: str) -> dict[str, int]:
    sizes = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another writer has removed it since it was listed
                if entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
    return sizes


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Turn errors of a file system, which can be of any class, into OSErrors."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(_said(error)) from error


def _said(error: Exception) -> str:
    """An error's text, with its class if it is not a plain system error."""
    if isinstance(error, OSError) and (error.strerror or type(error) is OSError):
        return (error.strerror or str(error)).rstrip(".")
    return f"{type(error).__name__}: {str(error)[:300]}".rstrip(". ")
