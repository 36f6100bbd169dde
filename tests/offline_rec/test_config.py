"""The configuration: defaults, layers, what is refused and how it is said."""

import subprocess
import sys

import pytest
import yaml

from data_tools.errors import ConfigError
from offline_rec.config import FitConfig, changed_fields, describe_fields, fit_config, to_yaml

PATHS = {"dataset": "ds", "model": "m", "out": "run"}


def test_config_is_importable_without_torch():
    code = "import sys, offline_rec.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_field_has_a_one_line_description():
    for name, default, description in describe_fields():
        assert description, name
        assert "\n" not in default + description
        assert description.endswith("."), name


def test_yaml_then_set_then_flags(tmp_path):
    file = tmp_path / "fit.yaml"
    file.write_text(
        "lr: 1e-4\nobjective: {epsilon_low: 0.3, epsilon_high: 0.4}\nseed: 1\nweight: red_weight(1)\n"
    )
    config = fit_config(
        file, overrides=["seed=2", "objective.epsilon_low=6e-1"], flags={**PATHS, "seed": 3, "steps": None}
    )
    assert config.lr == 1e-4
    assert config.objective == {"epsilon_low": 0.6, "epsilon_high": 0.4}
    assert config.seed == 3
    assert config.weight == "red_weight(1)"
    assert config.steps is None


def test_the_resolved_file_gives_the_same_config_again(tmp_path):
    config = FitConfig(**PATHS, lr=3e-5, betas=(0.8, 0.9), where="reward > 0", objective={"epsilon_low": 0.1})
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert fit_config(file) == config
    assert list(yaml.safe_load(to_yaml(config))) == list(FitConfig.model_fields)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("where=extra->>'tier' = 'gold' # all: of it", "where", "extra->>'tier' = 'gold' # all: of it"),
        ("weight=1", "weight", "1"),
        ("keep=true", "keep", "true"),
        ("where=null", "where", None),
        ("lr=1e-5", "lr", 1e-5),
        ("betas=[0.9, 0.95]", "betas", (0.9, 0.95)),
        ("max_kl=null", "max_kl", None),
        ("objective={epsilon_low: 0.1}", "objective", {"epsilon_low": 0.1}),
    ],
)
def test_set_takes_sql_as_text_and_the_rest_as_yaml(text, field, value):
    assert getattr(fit_config(overrides=[text], flags=PATHS), field) == value


def test_yaml_may_hold_bare_numbers_and_booleans_where_sql_is_meant(tmp_path):
    file = tmp_path / "fit.yaml"
    file.write_text("weight: 1\nkeep: true\nbaseline: 0.5\n")
    config = fit_config(file, flags=PATHS)
    assert (config.weight, config.keep, config.baseline) == ("1", "true", "0.5")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["stepz=3"], "did you mean 'steps'?"),
        (["group_per_step=3"], "did you mean 'groups_per_step'?"),
        (["lr"], "is not KEY=VALUE"),
        (["=3"], "is not KEY=VALUE"),
        (["objective.=3"], "is not KEY=VALUE"),
        (["lr.x=3"], "lr holds no parameters"),
        (["lr=fast"], "lr: input should be a valid number"),
        (["lr=-1"], "lr: input should be greater than or equal to 0, got -1"),
        (["schedule=step"], "'constant', 'linear' or 'cosine'"),
        (["steps=3", "epochs=1"], "steps and epochs are both given"),
        (["betas=[0.9"], "betas: '[0.9' is not a YAML value"),
        (["betas=[0.9]"], "betas.1 is missing\ngive it in the file or with --set betas=VALUE"),
        (["lr=1e400"], "lr: input should be a finite number"),
        (["max_kl=.inf"], "max_kl: input should be a finite number"),
        (["objective.epsilon_low=[1]"], "objective.epsilon_low: input should be a finite number, a text"),
        (["shaping.tau=.nan"], "--set shaping.tau=VALUE overrides it"),
    ],
)
def test_what_is_wrong_is_named(texts, message):
    with pytest.raises(ConfigError) as caught:
        fit_config(overrides=texts, flags=PATHS)
    assert message in str(caught.value)


def test_paths_are_taken_as_paths(tmp_path):
    config = FitConfig(dataset=tmp_path / "ds", model=tmp_path, out=tmp_path / "run", reference=tmp_path)
    assert (config.dataset, config.reference) == (f"{tmp_path}/ds", str(tmp_path))
    assert fit_config(overrides=["reference=1e3"], flags=PATHS).reference == "1e3"


def test_a_missing_path_is_named():
    with pytest.raises(ConfigError, match="model is missing"):
        fit_config(flags={"dataset": "ds", "out": "run"})


@pytest.mark.parametrize("text", ["- a\n", "a: [", "\x00"])
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path, text):
    file = tmp_path / "fit.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"fit\.yaml"):
        fit_config(file, flags=PATHS)
    with pytest.raises(ConfigError, match=r"absent\.yaml cannot be read: No such file"):
        fit_config(tmp_path / "absent.yaml", flags=PATHS)


def test_what_is_no_yaml_is_named_with_its_line(tmp_path):
    (tmp_path / "fit.yaml").write_text("steps: 1\n\tlr: 1\n")
    with pytest.raises(ConfigError, match=r"fit\.yaml cannot be read: line 2: found character '\\t'"):
        fit_config(tmp_path / "fit.yaml", flags=PATHS)


def test_python_users_are_told_the_nearest_key_too():
    with pytest.raises(ValueError, match="did you mean 'anchor'"):
        FitConfig(**PATHS, ancor="start")


def test_a_resume_may_change_what_decides_no_update():
    before = FitConfig(**PATHS, steps=10)
    now = before.model_copy(update={"tokens_per_micro_batch": 7, "save_every": 3, "steps": 20})
    assert changed_fields(before, now) == []


def test_a_resume_may_not_change_the_updates():
    before = FitConfig(**PATHS, steps=10, schedule="linear")
    now = before.model_copy(update={"lr": 1e-3, "steps": 20})
    assert changed_fields(before, now) == ["steps: 10 -> 20", "lr: 1e-06 -> 0.001"]
