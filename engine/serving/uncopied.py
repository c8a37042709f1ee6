"""`Uncopied`: what cannot be copied or pickled, with what to do instead."""

from typing import Any, ClassVar, NoReturn

from replaylens.engine.errors import CannotCopy


class Uncopied:
    """`copy.copy`, `copy.deepcopy` and `pickle` raise CannotCopy: a second owner of the same pages would break both."""

    _instead: ClassVar[str]
    """what to do"""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CannotCopy(
            f"{type(self).__name__} cannot be copied or pickled: it owns pages of a live KV cache. {self._instead}"
        )
