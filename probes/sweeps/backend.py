"""The joblib backend on which a sweep runs its processes."""

from collections.abc import Iterator
from contextlib import contextmanager

from replaylens.engine.errors import MissingPackage
from replaylens.engine.request.values import shown
from replaylens.probes.errors import ProbeError


@contextmanager
def joblib_backend(name: str | None) -> Iterator[None]:
    """Use this joblib backend during the sweep. Raises ProbeError for an unknown one, MissingPackage without Ray."""
    if name is None:
        yield
        return
    import joblib

    if name == "ray":
        try:
            from ray.util.joblib import register_ray
        except ImportError:
            raise MissingPackage("backend='ray' needs the package ray. Install it: pip install 'ray[default]'.") from None

        register_ray()
    try:
        config = joblib.parallel_config(backend=name)
    except (ValueError, TypeError) as error:
        raise ProbeError(f"Unknown backend {shown(name)}. Use loky, multiprocessing, threading or ray. ({error})") from None
    with config:
        yield
