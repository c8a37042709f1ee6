"""The cache folder, for what is kept between processes: certificates and fetched models."""

import os
from pathlib import Path

CACHE_VARIABLE = "REPLAYLENS_CACHE"


def cache_folder() -> Path:
    """$REPLAYLENS_CACHE, or replaylens/ in the user's cache folder."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "replaylens")
