"""`KnownLenses`: the tuned lenses of an engine. Captures refer to them by digest."""

from replaylens.engine.errors import BadRequest
from replaylens.engine.lens.tuned import TunedLens
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.request.capture import LensSpec
from replaylens.engine.request.values import instance


class KnownLenses:
    """Tuned lenses by digest, all trained for the unembedding of one model."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._by_digest: dict[str, TunedLens] = {}

    def add(self, lens: TunedLens) -> str:
        """Add a lens, so that captures can use it, and return its digest. OtherFingerprint if it belongs to another model."""
        instance("lens", lens, TunedLens, "a TunedLens")
        self._by_digest[lens.digest] = lens.require(self.model)
        return lens.digest

    def of(self, spec: LensSpec | None) -> TunedLens | None:
        """The tuned lens of the spec; None for the plain lens. BadRequest if it was not added."""
        if spec is None or spec.tuned is None:
            return None
        if spec.tuned not in self._by_digest:
            raise BadRequest(
                f"This engine does not have the tuned lens {spec.tuned[:16]} that the capture asks for. "
                "Add it with engine.capture_spec('Z', lens=...)."
            )
        return self._by_digest[spec.tuned]
