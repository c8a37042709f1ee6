"""What a dump says about its rows, compared with the rows: entries of sites, types of labels, accepted rows, locators.

No digest of the content covers these, and the seal of a manifest only shows that it was not changed by accident.
"""

from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from replaylens.engine.dump.content import LOCATORS, count_accepted
from replaylens.engine.dump.difference import Difference
from replaylens.engine.dump.files import DumpFiles
from replaylens.engine.dump.manifest import SiteEntry


def index_problems(files: DumpFiles) -> list[str]:
    """One line for everything in which the index contradicts the manifest or the order of its own rows. Needs no engine.

    Raises BadDump if the index cannot be read.
    """
    labels, found = files.manifest.labels, list[str]()
    schema = files.lines(0, files.columns).schema
    for name, said in labels.items():
        if (kind := str(schema.field(name).type)) != said:
            found.append(f"label {name} is of type {said} in the manifest, and {kind} in the index")
    for number, shard in enumerate(files.manifest.shards):
        lines = files.lines(number, ["accepted", *LOCATORS])
        if (accepted := count_accepted(lines)) != shard.accepted_rows:
            found.append(f"{shard.name} has {shard.accepted_rows} accepted rows in the manifest, and {accepted} in the index")
        for column, wanted in zip(LOCATORS, (np.full(shard.rows, number), np.arange(shard.rows)), strict=True):
            values = lines.column(column)
            if values.null_count or not np.array_equal(values.to_numpy(), wanted):
                found.append(f"the index column {column!r} does not say where the rows of {shard.name} are stored")
    return found


def sites_differ(here: Mapping[str, SiteEntry], there: Mapping[str, SiteEntry]) -> Difference | None:
    """The first site that is described differently. Their order does not count."""
    for name in sorted({*here, *there}):
        mine, yours = here.get(name), there.get(name)
        if mine is None or yours is None:
            said = ("missing" if entry is None else "present" for entry in (mine, yours))
            return Difference(None, None, None, f"site {name}", None, *said)
        for field in fields(SiteEntry):
            values = getattr(mine, field.name), getattr(yours, field.name)
            if values[0] != values[1]:
                return Difference(None, None, None, f"site {name}, {field.name}", None, *map(_shown, values))
    return None


def labels_differ(here: Mapping[str, str], there: Mapping[str, str], accepted: bool) -> Difference | None:
    """The first label with another type. `accepted`: rejected rows, which may alone have values of a label, do not count."""
    for name in sorted({*here, *there}):
        types = here.get(name, "missing"), there.get(name, "missing")
        if types[0] != types[1] and not (accepted and "null" in types):
            return Difference(None, None, None, f"label {name}", None, *types)
    return None


def _shown(value: object) -> str:
    return str(list(value) if isinstance(value, tuple) else value)
