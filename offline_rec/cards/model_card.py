"""The card of the model of a run: how it came to be, by the files of its run directory alone."""

from pathlib import Path
from typing import Any

from data_tools.shaping import Shaping
from offline_rec.algorithms import algorithm
from offline_rec.cards.data_sections import origin, place, reward_section, span_facts
from offline_rec.cards.judgement import evaluations, off_policy
from offline_rec.cards.loop_card import loop_sections, reward_of
from offline_rec.cards.markdown import card, facts, fenced, folded, plain, sections, table
from offline_rec.config import FitConfig
from offline_rec.data.admission import LEFT_OUT
from offline_rec.data.snapshot import Snapshot
from offline_rec.training.metrics import read_metrics
from offline_rec.training.plan import objective_parameters, shaping_fields

INTRO = "A policy fitted with `rec` to responses that were already logged."

USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")"""

ADAPTER_USAGE = """\
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("PATH")"""

TRAINING = (
    *("lr", "schedule", "warmup_steps", "groups_per_step", "betas", "weight_decay", "max_grad_norm"),
    *("anchor", "reference", "kl_coef", "kl_kind", "max_tokens", "retokenise", "split", "seed"),
    *("lora_rank", "lora_alpha", "quantise", "dtype", "max_kl", "min_ess"),
)
"""Fields of a configuration that decide the weights, besides algorithm and shaping."""

PATHS = ("anchor", "reference")

HELDOUT = {
    "value_logged": "reward logged",
    "value": "reward estimated",
    "kl": "KL to the anchor",
    "ess": "ESS",
}

FILES = 50
"""Files of the data that a card names."""

Facts = dict[str, Any]


def model_card(
    run: Path,
    config: FitConfig,
    *,
    updates: int | None,
    loop: Path | None = None,
    adapter: bool = False,
) -> str:
    """The card of the weights of a fit's run directory after so many updates.

    `loop`: the directory of the loop whose last fit that is. `adapter`: of the adapter alone. The same run
    gives the same card.
    """
    whole = run if loop is None else loop
    snapshot = Snapshot.read(run)
    row = algorithm(config.algorithm)
    parts: dict[str, str | None] = {
        "Training": facts(_training(config, snapshot, updates, whole)),
        "Algorithm": _algorithm(config),
        **(loop_sections(loop) if loop else {}),
        **(_data(config, snapshot, reward_of(loop) if loop else None) if snapshot else {}),
        "Off-policy estimate": off_policy(whole),
        "Evaluation by sampling": evaluations(whole),
        "Use": fenced(ADAPTER_USAGE if adapter else USAGE, "python"),
    }
    base = base_model(config.model)
    metadata = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        **({"base_model": base} if base else {}),
        "tags": ["offline-rec"],
        "rec": {
            "algorithm": row.name,
            **({} if updates is None else {"updates": updates}),
            **({"snapshot": snapshot.hash} if snapshot else {}),
        },
    }
    return card(metadata, plain(whole.absolute().name), f"{INTRO}\n\n{sections(parts)}")


def base_model(path: str) -> str | None:
    """The hub's name of the model that a run began with, where its path is that of the hub's cache."""
    told = place(path) or ""
    return told if "models--" in path and "/" in told else None


def _training(config: FitConfig, snapshot: Snapshot | None, updates: int | None, run: Path) -> Facts:
    records = read_metrics(run)
    trained = [record for record in records if "loss" in record and record["step"] <= (updates or 10**18)]
    skipped = sum(bool(record.get("skipped")) for record in trained)
    stopped = next((record["stopped"] for record in records if record.get("stopped")), None)
    heldout = [record for record in records if "heldout" in record and record["step"] <= (updates or 10**18)]
    told = heldout[-1] if heldout else {"heldout": {}}
    return {
        "started from": place(config.model),
        "fingerprint of the start's weights": snapshot.model or None if snapshot else None,
        "continued from": place(config.continue_from),
        "updates": updates,
        "epochs": trained[-1].get("epoch") if trained else None,
        "tokens in these updates": int(sum(record.get("tokens") or 0 for record in trained)) or None,
        "updates skipped, as not finite": skipped or None,
        "stopped early": stopped,
        "held-out measurements after update": told.get("step"),
        **{name: told["heldout"].get(key) for key, name in HELDOUT.items()},
    }


def _algorithm(config: FitConfig) -> str:
    row = algorithm(config.algorithm)
    composition = row.composition.changed(**objective_parameters(config))
    shaping = Shaping.parse(shaping_fields(config, row.shaping))
    parts = {name: getattr(composition, name) for name in ("keep", "importance", "regulariser", "reduction")}
    fields = {name: getattr(config, name) for name in TRAINING}
    fields |= {name: place(fields[name]) for name in PATHS}
    if not config.kl_coef:
        fields.pop("kl_kind")
    if config.lora_rank is None:
        fields = {name: value for name, value in fields.items() if not name.startswith("lora_")}
    changed = shaping.model_dump(exclude_defaults=True)
    shown = {"algorithm": row.name, "means": row.summary, "source": row.source, **parts}
    shown |= {name: float(value) for name, value in composition.parameters.items()}
    settings = shown | {name: value for name, value in fields.items() if value is not None}
    sql = fenced("\n".join(f"{name}: {value}" for name, value in changed.items()), "sql")
    shaped = (
        f"Shaping, where it is not the default:\n\n{sql}"
        if changed
        else "Shaping: the default in every field."
    )
    formula = f"Coefficient of a token's gradient:\n\n{fenced(row.formula)}"
    return f"{formula}\n\n{facts(settings)}\n\n{shaped}"


def _data(config: FitConfig, snapshot: Snapshot, reward: str | None) -> dict[str, str | None]:
    found = snapshot.provenance
    told = {
        "dataset": place(config.dataset),
        "snapshot": snapshot.hash,
        "rows trained on": snapshot.rows,
        "groups": snapshot.groups,
        "tokens, prompts included": snapshot.n_tokens,
        "rows measured on, held out": snapshot.holdout.get("rows"),
        **(span_facts(found) if found else {}),
    }
    left = [
        {"reason": reason, "rows": rows, "meaning": LEFT_OUT.get(reason)}
        for reason, rows in sorted(snapshot.left_out.items())
    ]
    files = "\n".join(f"{file.footer} {file.bytes} {file.name}" for file in snapshot.files[:FILES])
    more = len(snapshot.files) - FILES
    files += f"\n{more} more files are listed in snapshot.json" if more > 0 else ""
    notes = "\n".join(f"- {plain(note)}" for note in snapshot.notes)
    body = [facts(told), folded("The statement that chose and weighed the rows", fenced(snapshot.sql, "sql"))]
    body.append(folded("The files: hash of the footer, bytes, name", fenced(files)))
    return {
        "Data": "\n\n".join(body),
        **(origin(found) if found else {"Sources": "unknown"}),
        "Rewards": reward_section(found, reward) if found else "unknown",
        "Left out": table(left) or None,
        "Remarks": fenced(notes) if notes else None,
    }
