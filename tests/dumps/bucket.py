"""A stand-in for an object store: buckets that `makedirs` creates, errors of its own, and no connection when told so."""

import io
from typing import Any, ClassVar

from fsspec import AbstractFileSystem, register_implementation


class NoCredentials(Exception):
    """What libraries of object stores raise: no OSError, and no class that we know."""


class _Upload(io.BytesIO):
    def __init__(self, bucket: "BucketFileSystem", path: str) -> None:
        super().__init__()
        self.bucket, self.path, self.kept = bucket, path, True

    def discard(self) -> None:
        self.kept = False

    def close(self) -> None:
        if not self.closed and self.kept:
            self.bucket.pipe_file(self.path, self.getvalue())
        super().close()


class BucketFileSystem(AbstractFileSystem):
    """bucket://NAME/KEY. Objects and buckets are the class's, as they are a server's."""

    protocol = "bucket"
    root_marker = ""
    buckets: ClassVar[set[str]] = set()
    objects: ClassVar[dict[str, bytes]] = {}
    failure: ClassVar[Exception | None] = None
    """raised by every call"""

    @classmethod
    def reset(cls, *buckets: str) -> None:
        cls.buckets, cls.objects, cls.failure = set(buckets), {}, None

    def _reach(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _found(self, path: str) -> bytes:
        self._reach()
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._reach()
        self.buckets.add(path.split("/")[0])

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        self._reach()
        folder = path.rstrip("/") + "/"
        found = [name for name in self.objects if name.startswith(folder)]
        if not found and path.split("/")[0] not in self.buckets:
            raise FileNotFoundError(path)
        return [self.info(name) if detail else name for name in found]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self._reach()
        if path in self.buckets or any(name.startswith(path + "/") for name in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        return {"name": path, "size": len(self._found(path)), "type": "file"}

    def exists(self, path: str, **options: Any) -> bool:
        """As fsspec's own: whatever goes wrong, it is not there."""
        try:
            return bool(self.info(path))
        except Exception:
            return False

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return self._found(path)[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._reach()
        if path.split("/")[0] not in self.buckets:
            raise FileNotFoundError("The specified bucket does not exist")
        if mode == "create" and path in self.objects:
            raise FileExistsError(path)
        self.objects[path] = bytes(value)

    def rm_file(self, path: str) -> None:
        self._found(path)
        del self.objects[path]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._reach()
        return _Upload(self, path) if mode == "wb" else io.BytesIO(self._found(path))


register_implementation("bucket", BucketFileSystem, clobber=True)
