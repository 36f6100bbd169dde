"""The parts of a card that tell where rows come from."""

import re
from typing import Any

from offline_rec.cards.markdown import table, text

Facts = dict[str, Any]


def span_facts(found: Facts) -> Facts:
    """The time span of rows, in UTC; unknown where no row says when it was sampled."""
    span = found["span"]
    told = f"{span['first_sampled']} to {span['last_sampled']} UTC" if span["dated"] else "unknown"
    undated = (span["rows"] or 0) - (span["dated"] or 0)
    return {"sampled": told, "rows of unknown time": undated if span["dated"] and undated else None}


def origin(found: Facts) -> dict[str, str | None]:
    """The sections `Sources`, `Policies` and `Sampling`."""
    policies = [
        {
            "policy": one["policy"],
            "versions": _versions(one),
            "rows": one["rows"],
            "model": place(one["model"]),
            "revision": one["revision"],
            "tokenizer": one["tokenizer"],
            "sampler": one["sampler"],
        }
        for one in found["policies"]
    ]
    sources = [{"source": place(one["source"]), "rows": one["rows"]} for one in found["sources"]]
    return {
        "Sources": _listed(sources, found["n_sources"], "sources"),
        "Policies": _listed(policies, found["n_policies"], "policies"),
        "Sampling": _listed(found["sampling"], found["n_sampling"], "ways of sampling"),
    }


def reward_section(found: Facts, named: str | None = None) -> str:
    """What is known of rewards: who judged, how many rows, and what came of it."""
    rewards = found["rewards"]
    later = sum(one["rows"] for one in found["judges"])
    judges = [{"judged by": one["source"], "rows": one["rows"]} for one in found["judges"]]
    judged = rewards["judged"] + rewards["not_judged"] - later if found["n_judges"] <= len(judges) else None
    came = named if named is not None else "what the log, or the rule at its collect, said; not recorded"
    if judged is None or judged:
        judges.insert(0, {"judged by": came, "rows": judged})
    numbers = {name: rewards[name] for name in ("judged", "not_judged", "mean", "std", "min", "max")}
    body = table([numbers])
    return f"{_listed(judges, found['n_judges'] + (len(judges) - len(found['judges'])), 'judges')}\n\n{body}"


def place(name: str | None) -> str | None:
    """A path without the folders of the machine that it is on, or a URL without user and query."""
    if name is None:
        return None
    scheme, slashes, rest = name.partition("://")
    if slashes and re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*", scheme):
        return f"{scheme}://{rest.split('?')[0].rpartition('@')[2]}"
    parts = name.replace("\\", "/").rstrip("/").split("/")
    hub = next((part for part in parts if part.startswith("models--")), None)
    return hub.removeprefix("models--").replace("--", "/") if hub else parts[-1]


def _versions(one: Facts) -> str | None:
    oldest, newest = one["oldest_version"], one["newest_version"]
    return None if oldest is None else f"{oldest}" if oldest == newest else f"{oldest} to {newest}"


def _listed(records: list[Facts], total: int, what: str) -> str | None:
    if not records:
        return None
    more = total - len(records)
    return table(records) + (f"\n\n{text(more)} more {what} are not listed." if more > 0 else "")
