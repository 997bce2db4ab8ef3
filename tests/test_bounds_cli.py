"""The installed ``hess bounds``: outputs, sweeps, scalars that are given, what is refused, and Ctrl-C."""

import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from hesscore.bounds.tiers import COLUMNS, PARTS
from hesscore.spec import read_spec
from tests.command import CHECKPOINT, HESS, ROOT, VAL, rows_of, run, strict
from tests.test_analyze_terminal import on_terminal, plain

PAPER_BLOCK, ATTENTION, GPT2 = (
    ROOT / f"configs/blocks/{name}.yaml" for name in ("paper-block", "attention", "gpt2-small")
)


def bounds(*arguments, folder=None, **environment):
    return run(HESS, "bounds", *arguments, folder=folder, **environment)


def test_a_spec_takes_no_torch(tmp_path):
    """So that it takes less than a second."""
    out = tmp_path / "bounds.csv"
    code = f"""
import sys
from hesscore_cli.commands import app
sys.argv = ["hess", "bounds", {str(GPT2)!r}, "--seq-len", "512", "--csv", {str(out)!r}]
try:
    app()
finally:
    print("torch" in sys.modules)
"""
    result = run(sys.executable, "-c", code)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "False")
    rows = rows_of(out.read_text())
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == len(PARTS) * (8 * 9 // 2 + 1)
    assert {row["seq_len"] for row in rows} == {"512"}


def test_the_default_is_the_block_of_gpt2_small():
    named, default = bounds(GPT2, "--seq-len", "64", "--csv", "-"), bounds("--csv", "-")
    assert named.returncode == default.returncode == 0
    assert named.stdout == default.stdout


def test_all_tiers_of_a_block_in_order(tmp_path):
    out = tmp_path / "bounds.json"
    result = bounds(PAPER_BLOCK, "--tiers", "all", "--json", out)
    assert result.returncode == 0, result.stderr
    content = strict(out.read_text())
    assert list(content["tiers"]) == ["published", "apriori", "swept", "enclosure", "exact"]
    assert all(tier["hypotheses"] and tier["constants"] for tier in content["tiers"].values())
    for row in content["rows"]:
        exact, slack = row["exact"], row["exact_error"] + 1e-9 * row["exact"]
        assert row["converged"]
        assert row["enclosure_lower"] <= exact + slack
        assert exact - slack <= row["enclosure_upper"]
        assert exact - slack <= row["swept"]
        assert exact - slack <= row["apriori"]
    scalars = {scalar["name"]: scalar for scalar in content["blocks"][0]["scalars"]}
    assert scalars["attn.peak"]["origin"] == scalars["input.norm"]["origin"] == "data"
    assert scalars["attn.q.weight"]["origin"] == "weights"
    assert all(scalar["meaning"] for scalar in scalars.values())


def test_data_of_a_checkpoint(tmp_path):
    out = tmp_path / "bounds.json"
    words = [CHECKPOINT, "--data", VAL, "--max-tokens", "16", "--layers", "1", "--quiet"]
    result = bounds(*words, "--tiers", "apriori,exact", "--json", out)
    assert (result.returncode, result.stderr) == (0, "")
    content = strict(out.read_text())
    assert {row["layer"] for row in content["rows"]} == {1}
    assert all(row["apriori"] >= row["exact"] * (1 - 1e-9) for row in content["rows"])
    assert {"data_sha256", "checkpoint_sha256", "spec"} <= content.keys()
    measured = {scalar["name"]: scalar["value"] for scalar in content["blocks"][0]["scalars"]}
    low = measured["input.norm"] * 0.9
    refused = bounds(*words, "--tiers", "apriori", "--given", f"input.norm={low}")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "input.norm" in refused.stderr
    high = bounds(*words, "--tiers", "apriori", "--given", f"input.norm={2 * low}", "--json", "-")
    (given,) = [s for s in strict(high.stdout)["blocks"][0]["scalars"] if s["name"] == "input.norm"]
    assert (given["value"], given["origin"]) == (2 * low, "given")


def test_the_weights_of_a_checkpoint_alone():
    """Whatever the tokens: what a block's input can be follows from the block before."""
    result = bounds(CHECKPOINT, "--json", "-", "--seq-len", "32", "--seq-len", "64")
    assert result.returncode == 0, result.stderr
    content = strict(result.stdout)
    norms = {b["layer"]: {s["name"]: s["value"] for s in b["scalars"]}["input.norm"] for b in content["blocks"]}
    assert norms[0] < norms[1] < norms[2] < norms[3]
    assert {b["seq_len"] for b in content["blocks"]} == {32, 64}
    assert content["swept"] == "seq_len"
    data = strict(bounds(CHECKPOINT, "--data", VAL, "--max-tokens", "64", "--tiers", "apriori", "--json", "-").stdout)
    of = {(row["layer"], row["row"], row["column"], row["part"]): row["apriori"] for row in data["rows"]}
    for row in content["rows"]:
        assert row["apriori"] >= of[row["layer"], row["row"], row["column"], row["part"]]


def test_a_sweep_has_exponents_verdicts_and_a_picture(tmp_path):
    picture, out = tmp_path / "growth.svg", tmp_path / "growth.json"
    norms = [word for x in ("0.1", "0.2", "0.4") for word in ("--input-norm", x)]
    result = bounds(ATTENTION, *norms, "--tiers", "published,apriori,exact", "--plot", picture, "--json", out)
    assert result.returncode == 0, result.stderr
    growth = {(g["row"], g["column"], g["part"], g["tier"]): g for g in strict(out.read_text())["growth"]}
    for pair, claimed in {("attn.v.weight", "attn.v.weight"): 2, ("attn.q.weight", "attn.q.weight"): 6}.items():
        for tier in "published", "apriori", "exact":
            names = (*pair, "outer", tier)
            assert growth[names]["exponent"] == pytest.approx(claimed, abs=0.1)
    assert "QQ outer ~ input_norm^6 (arXiv 2410.10986): holds here" in result.stdout
    words = " ".join(ElementTree.parse(picture).getroot().itertext())
    assert "norm of the longest token" in words
    assert "attn.q exact" in words


def test_the_claim_of_a_fall_with_the_length_does_not_hold():
    lengths = [word for n in ("8", "16", "32") for word in ("--seq-len", n)]
    result = bounds(ATTENTION, *lengths, "--tiers", "published,apriori,exact")
    assert result.returncode == 0, result.stderr
    assert "QQ outer ~ seq_len^-3 (arXiv 2510.16927): does not hold here" in result.stdout


def test_a_width_keeps_the_ratio_of_the_ffn(tmp_path):
    result = bounds(PAPER_BLOCK, "--width", "16", "--width", "64", "--json", "-")
    content = strict(result.stdout)
    assert [(b["spec"]["d_model"], b["spec"]["d_ff"]) for b in content["blocks"]] == [(16, 32), (64, 128)]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--seq-len", "-1"], "--seq-len"),
        (["--seq-len", "0"], "--seq-len"),
        (["--heads", "0"], "--heads"),
        (["--width", "770"], "d_model"),
        (["--heads", "5"], "heads"),
        (["--input-norm", "nan"], "--input-norm"),
        (["--input-norm", "-3"], "--input-norm"),
        (["--input-norm", "inf"], "--input-norm"),
        (["--given", "norm1.scale=nan"], "norm1.scale"),
        (["--given", "norm1.scale=0"], "norm1.scale"),
        (["--given", "norm1.scales=1"], "did you mean norm1.scale"),
        (["--given", "norm1.scale"], "--given"),
        (["--given", "attn.peak=0.5"], "attn.peak"),  # of a causal block
        (["--tiers", "aprior"], "did you mean apriori"),
        (["--tiers", ""], "--tiers"),
        (["--target", "self"], "--target"),
        (["--plot", "x.svg"], "--plot"),
        (["--plot", "x.pdf", "--seq-len", "1", "--seq-len", "2"], "--plot"),
        (["--data", str(VAL)], "--data"),
        (["--layers", "0"], "--layers"),
        (["--seq-len", "8", "--seq-len", "16", "--heads", "1", "--heads", "2"], "--heads"),
        ([str(CHECKPOINT), "--width", "64"], "--width"),
        ([str(CHECKPOINT), "--seq-len", "129"], "--seq-len"),
        ([str(CHECKPOINT), "--data", str(VAL), "--seq-len", "64"], "--seq-len"),
        (["--csv", "-", "--json", "-"], "stdout"),
        (["--seq-len", "1000000", "--tiers", "exact"], "seq_len"),
    ],
)
def test_nonsense_is_refused_by_name(arguments, named, tmp_path):
    result = bounds(*arguments, folder=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert named in result.stderr
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_read_is_3(tmp_path):
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    assert bounds("broken.pt", folder=tmp_path).returncode == 3
    assert bounds("none.yaml", folder=tmp_path).returncode == 3


def test_a_terminal_shows_the_diagonal_and_what_the_tiers_rest_on():
    code, shown, _ = on_terminal(["--tiers", "apriori,exact", "--quiet", PAPER_BLOCK], 100, command="bounds")
    assert code == 0
    text = plain(shown)
    assert "apriori/exact" in text
    assert "constants proved" in text
    assert max(map(len, text.splitlines()[1:])) <= 100  # the first has the name of the file
    assert len([line for line in text.splitlines() if line.strip().startswith("mlp.down.weight")]) == len(PARTS)


def test_an_interrupt_keeps_what_is_finished(tmp_path):
    words = [HESS, "bounds", str(CHECKPOINT), "--data", str(VAL), "--max-tokens", "32", "--csv", "out.csv"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        process.stderr.readline()  # a note, as the work begins
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    rows = rows_of((tmp_path / "out.csv").read_text())
    assert 0 < len(rows) < 4 * 111


def test_the_default_block_is_configured_as_its_file_says():
    from hesscore.bounds.settings import DEFAULT

    assert read_spec(GPT2) == DEFAULT


def test_the_targets_are_those_of_a_problem():
    from hesscore.bounds.scalars import TARGETS
    from hesscore.problem import TARGETS as MADE

    assert tuple(MADE) == TARGETS


def test_the_same_seed_gives_the_same_bytes():
    words = [PAPER_BLOCK, "--tiers", "apriori,enclosure,exact", "--csv", "-"]
    assert bounds(*words).stdout == bounds(*words).stdout
