"""`KnownLenses`: the one home of an engine's tuned lenses. A capture names its lens by digest; here it is looked up."""

from replaylens.engine.errors import BadRequest
from replaylens.engine.lens.tuned import TunedLens
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.request.capture import LensSpec
from replaylens.engine.request.values import instance


class KnownLenses:
    """Tuned lenses by digest, all of them trained for the unembedding of one model."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._by_digest: dict[str, TunedLens] = {}

    def add(self, lens: TunedLens) -> str:
        """Mutates: from now on captures may ask for the lens. Its digest, or OtherFingerprint: it is another model's."""
        instance("lens", lens, TunedLens, "a TunedLens")
        self._by_digest[lens.digest] = lens.require(self.model)
        return lens.digest

    def of(self, spec: LensSpec | None) -> TunedLens | None:
        """The lens that Z is read through; None: the plain one. BadRequest where nobody made it known."""
        if spec is None or spec.tuned is None:
            return None
        if spec.tuned not in self._by_digest:
            raise BadRequest(
                f"Z is to be read through the tuned lens {spec.tuned[:16]}, which this engine does not have: make it known "
                "with engine.capture_spec('Z', lens=...)"
            )
        return self._by_digest[spec.tuned]
