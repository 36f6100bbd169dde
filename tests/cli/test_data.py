"""The small commands over a dataset: what they print, and that they do it."""

import json


def facts(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def count(run, dataset, where="true"):
    return facts(run("sql", dataset, f"SELECT count(*) AS n FROM rollouts WHERE {where}", "--json"))[0]["n"]


def test_stats_tells_rows_groups_and_missing_rewards(run, dataset):
    told = facts(run("stats", dataset, "--json"))
    assert (told["rows"], told["groups"]["count"], told["rewards"]["null"]) == (40, 10, 8)


def test_stats_for_a_reader_names_the_policies(run, dataset):
    result = run("stats", dataset)
    assert result.exit_code == 0, result.output
    assert "rows" in result.stdout
    assert "\npolicies\n" in result.stdout


def test_delete_counts_first_and_then_erases(run, dataset):
    where = "extra->>'tier' = 'free'"
    before = count(run, dataset, where)
    assert facts(run("delete", dataset, "--where", where, "--dry-run", "--json"))["rows"] == before
    assert count(run, dataset, where) == before
    assert facts(run("delete", dataset, "--where", where, "--json"))["rows"] == before
    assert count(run, dataset, where) == 0


def test_delete_says_what_it_did_what_it_would_do_and_that_nothing_matched(run, dataset):
    where = "extra->>'tier' = 'free'"
    assert (
        "14 rows would be erased from 1 batches"
        in run("delete", dataset, "--where", where, "--dry-run").stdout
    )
    assert "14 rows erased from 1 batches" in run("delete", dataset, "--where", where).stdout
    assert run("delete", dataset, "--where", where).stdout.startswith("0 rows: ")


def test_what_was_deleted_does_not_come_back(run, dataset, log):
    run("delete", dataset, "--where", "policy = 'old'")
    report = run("collect", log, "--into", dataset)
    assert report.exit_code == 0, report.output
    assert count(run, dataset) == 20


def test_delete_needs_a_condition(run, dataset):
    result = run("delete", dataset)
    assert result.exit_code == 2
    assert "--where" in result.stderr


def test_compact_leaves_every_row(run, dataset, log, tmp_path):
    run("collect", log, "--into", dataset, "--run", "again")
    before = count(run, dataset)
    assert facts(run("compact", dataset, "--json"))["files_after"] == 1
    assert count(run, dataset) == before


def test_algorithms_lists_formula_scope_and_needs(run):
    result = run("algorithms")
    assert "rec-oneside-nois" in result.stdout
    scopes = {row["scope"] for row in facts(run("algorithms", "--json"))}
    assert scopes == {"token", "sequence", "group", "step"}


def test_an_unknown_algorithm_names_the_nearest(run):
    result = run("algorithms", "rec-oneside-noise")
    assert result.exit_code == 2
    assert "rec-oneside-nois" in result.stderr


def test_formats_says_what_each_carries(run):
    rows = facts(run("formats", "--json"))
    assert {"format", "prompt", "reward", "ids", "logprobs"} <= set(rows[0])
    assert all(row["format"] in run("formats").stdout for row in rows)


def test_a_format_by_name_is_told_in_full(run):
    assert "prompt" in run("formats", "verl").stdout
    assert facts(run("formats", "verl", "--json"))["format"] == "verl"
    assert run("formats", "verll").exit_code == 2
