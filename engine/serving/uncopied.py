"""`Uncopied`: the base of objects that cannot be copied or pickled."""

from typing import Any, ClassVar, NoReturn

from replaylens.engine.errors import CannotCopy


class Uncopied:
    """`copy.copy`, `copy.deepcopy` and `pickle` raise CannotCopy: two owners of the same pages would corrupt each other."""

    _instead: ClassVar[str]
    """what to do instead, for the error message"""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CannotCopy(
            f"{type(self).__name__} cannot be copied or pickled: it owns pages of a live KV cache. {self._instead}"
        )
