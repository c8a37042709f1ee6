"""What a dump says about its rows, compared with the rows: entries of sites, accepted rows, locators.

No digest of the content covers these, and the seal of a manifest only shows that it was not changed by accident.
"""

from collections.abc import Mapping
from dataclasses import fields

from replaylens.engine.dump.content import LOCATORS, count_accepted
from replaylens.engine.dump.difference import Difference
from replaylens.engine.dump.files import DumpFiles
from replaylens.engine.dump.manifest import SiteEntry


def index_problems(files: DumpFiles) -> list[str]:
    """One line for every shard whose accepted rows the index counts otherwise than the manifest. Needs no engine.

    Raises BadDump if the index cannot be read, has columns of other types, or does not say where the rows are stored.
    """
    found = list[str]()
    for number, shard in enumerate(files.manifest.shards):
        lines = files.lines(number, ["accepted", *LOCATORS])  # which checks the locators
        if (accepted := count_accepted(lines)) != shard.accepted_rows:
            found.append(f"{shard.name} has {shard.accepted_rows} accepted rows in the manifest, and {accepted} in the index")
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
