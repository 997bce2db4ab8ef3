"""The speed tables: they check values, and report times without judging them."""

import gc
import json
import sys
import weakref
from functools import partial
from itertools import chain, repeat
from math import ceil, nan
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.func import functional_call, jacrev, jvp

from hesscore.bench import cases, environment, libraries, products, timing
from hesscore.bench.block import hutchinson, probes_for
from hesscore.bench.contestants import for_hessian
from hesscore.bench.drawn import Drawn
from hesscore.bench.page import page
from hesscore.bench.peak import FORGET, peak_of, peaks
from hesscore.bench.plain import flat, norm_written_out, of_flat
from hesscore.bench.tightness import tightness
from hesscore.bench.timing import Case, Contestant, Timing, measure, writing
from hesscore.explicit.block import block_hessian
from hesscore.explicit.kronecker import KroneckerSum, Place, Term
from hesscore.spec import Spec
from tests.command import ROOT, run
from tests.test_hessian import twice

DOCS = Path(__file__).parent.parent / "docs"

PROGRAM = """
import os, torch
import hesscore.bench as bench
from hesscore.bench.tightness import tightness
from hesscore.bench.timing import Case, Contestant
from hesscore_cli.commands import app

def value(x):
    return Contestant(f"gives {x}", "rival", lambda: lambda: x, lambda x: torch.tensor([x]))

bench.cases = lambda quick: iter([Case("a number", "1", (value(1.0), value(float(os.environ["VALUE"]))), 1e-3)])
app()
"""


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0)
    monkeypatch.setattr(timing, "LEAST", 1)


def test_all_that_is_compared_agrees(short):
    names = []
    for case in cases(quick=True):
        found = measure(case)
        names.append(case.name)
        assert all(t.right for t in found), found
        assert all(t.error is not None for t in found if t.role != "floor" and "Hutchinson" not in t.contestant)
        assert found[0].role == "ours"
        assert {t.role for t in found} == {"ours", "rival"} | ({"floor"} if "trace" not in case.name else set())
    assert len(set(names)) == len(names) == 13


def test_contestants_take_turns(short, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(timing, "LEAST", 4)

    def contestant(name):
        return Contestant(name, "ours", lambda: lambda: calls.append(name))

    found = measure(Case("none", "", (contestant("a"), contestant("b")), 0.0))
    assert calls == ["a", "b"] * 5  # the first to warm up
    assert [t.repeats for t in found] == [4, 4]
    assert [t.error for t in found] == [None, None]


def test_the_peak_is_of_the_contestant_and_not_of_who_asks():
    """A process begins with its parent's mark of the most it ever took."""
    ballast = torch.ones(2**27)  # half a gigabyte
    (case,) = products.cases(quick=True)
    taken = peaks(case, quick=True)
    assert list(taken) == [contestant.name for contestant in case.contestants]
    for peak in taken.values():
        assert 0 <= peak["run_bytes"] <= peak["peak_bytes"] < ballast.nbytes / 2
        assert peak["peak_bytes"] > 0


@pytest.mark.skipif(not (FORGET.exists() and timing.GLIBC), reason="the system does not tell")
def test_each_pays_for_its_memory_alone():
    """Whoever took part before, and whatever that left free."""
    size = 2**24
    kept = []

    def leaves_much_behind():
        pieces = [torch.ones(size // 64) for _ in range(128)]
        kept.append(pieces.pop())  # above all that is free, so that none of it is at the end of the heap

    taken = []
    for _ in range(2):
        taken.append(peak_of(writing(size, dtype=torch.float32).prepare)["run_bytes"])
        leaves_much_behind()
    assert taken == pytest.approx([4 * size] * 2, rel=0.01)


def test_what_refers_to_itself_gives_its_memory_back():
    circle = [torch.ones(1)]
    seen = weakref.ref(circle[0])
    circle.append(circle)  # type: ignore[arg-type]
    gc.disable()
    try:
        del circle
        assert seen() is not None
        timing.give_back()
    finally:
        gc.enable()
    assert seen() is None


def test_runs_start_from_fresh_memory_where_it_is_never_warm(short, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(timing, "give_back", lambda: calls.append("give back"))
    contestants = tuple(Contestant(name, "ours", partial(partial, calls.append, name)) for name in "ab")
    measure(Case("", "", contestants, 0.0, 2**25 + 1))
    assert calls == ["a", "b", "give back", "give back", "a", "give back", "b"]
    calls.clear()
    measure(Case("", "", contestants, 0.0, 2**25))
    assert calls == ["a", "b", "give back", "a", "b"]
    fresh = [case.name for case in cases(quick=False) if case.fresh]
    assert [name.partition(",")[0] for name in fresh] == [
        "FFN Jacobian by W_1",
        "FFN Jacobian by W_2",
        "attention Hessian by W_Q",
        "block Hessian",
    ]


@pytest.mark.parametrize(("error", "right"), [(None, True), (0.1, True), (0.2, False), (nan, False)])
def test_a_wrong_value_is_no_contestant(error, right):
    assert Timing("", "", "", "rival", 1.0, 3, error, 0.1).right is right


@pytest.mark.parametrize(("value", "code"), [("1.0", 0), ("1.1", 1), ("nan", 1)])
def test_the_command_fails_on_a_wrong_value_alone(tmp_path, value, code):
    path = tmp_path / "bench.json"
    result = run(
        sys.executable, "-c", PROGRAM, "bench", "--quick", "--json", path, "--md", tmp_path / "bench.md", VALUE=value
    )
    assert result.returncode == code
    assert ("is off by" in result.stderr) is bool(code)
    stored = json.loads(path.read_text())
    assert {row["contestant"] for row in stored["rows"]} == {"gives 1.0", f"gives {float(value)}"}
    assert stored["torch"] == torch.__version__
    assert set(environment()) <= set(stored)
    assert (tmp_path / "bench.md").read_text() == page(stored)


def test_a_wrong_structured_result_is_noticed(short):
    """Though nobody writes it out in the time that is measured."""
    x = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, entry = Place(0, (3, 1), (1, 1)), torch.ones(1, 1, 1, dtype=torch.float64)

    def cubic(x):
        return x.sum() ** 3

    def times(factors):
        ones = torch.ones(1, 3, dtype=torch.float64)
        return KroneckerSum((3, 3), x.dtype, [Term(one, one, ones, ones, next(factors) * 6 * x.sum() * entry)])

    for factor, wrong in (1.0, []), (1.1, ["structured"]):
        factors = chain([1.0, factor], repeat(1.0))  # dense, then structured, give their values
        found = measure(Case("", "", tuple(for_hessian(partial(times, factors), cubic, x)), 1e-12))
        assert [t.contestant for t in found if not t.right] == wrong


def test_the_floor_writes_what_it_says():
    floor = writing(3, 5, dtype=torch.float64).prepare()()
    assert floor.shape == (3, 5)
    assert floor.dtype == torch.float64
    assert (floor == 1).all()


SMALL = Spec(d_model=4, d_ff=5, heads=2, seq_len=3, bias=False)


def test_as_many_probes_as_an_accuracy_needs():
    drawn = Drawn(SMALL, torch.float64)
    loss, x = of_flat(drawn.loss, drawn.weights), flat(drawn.weights)
    _, hessian = twice(loss, x)
    variance = 2 * float((hessian - hessian.diag().diag()).square().sum())
    assert probes_for(block_hessian(drawn.curvature(), SMALL), 0.01) == ceil(
        variance / float(0.01 * hessian.trace()) ** 2
    )

    signs = torch.randint(2, (20_000, len(x)), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    estimates = ((signs @ hessian) * signs).sum(1)
    assert float(estimates.var()) == pytest.approx(variance, rel=0.1)
    found = hutchinson(loss, x, 400, torch.Generator().manual_seed(1))
    assert abs(found - float(hessian.trace())) < 4 * (variance / 400) ** 0.5


def test_the_written_out_norm_is_layernorm():
    x, gain, shift = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    for b in shift[0], None:
        right = torch.nn.functional.layer_norm(x, (4,), gain[0], b, 1e-5)
        assert float((norm_written_out(x, (4,), gain[0], b, 1e-5) - right).norm()) < 1e-14


class Curvlinops:
    """``HessianLinearOperator`` of curvlinops 3.0 as it is documented: forward over ``jacrev``, vectors flat."""

    def __init__(self, model_func, loss_func, params, data, check_deterministic=True):
        named = {name: p for p in params for name, other in model_func.named_parameters() if other is p}
        assert len(named) == len(params)
        ((self.x, self.y),) = data
        self.named, self.model, self.loss = named, model_func, loss_func
        assert loss_func.reduction == "mean"

    def __matmul__(self, v):
        at = {name: p.detach() for name, p in self.named.items()}
        parts = dict(zip(at, v.split([p.numel() for p in at.values()]), strict=True))
        along = {name: parts[name].view(p.shape) for name, p in at.items()}

        def loss(weights):
            return self.loss(functional_call(self.model, weights, (self.x,)), self.y)

        return flat(jvp(jacrev(loss), (at,), (along,))[1])


class Eigenthings:
    """``HessianOperator`` of hessian-eigenthings 1.0 as it is documented: double backward, vectors flat."""

    def __init__(self, model, dataloader, loss_fn):
        self.model, (self.batch,), self.loss = model, dataloader, loss_fn

    def matvec(self, v):
        weights = list(self.model.parameters())
        slopes = torch.autograd.grad(self.loss(self.model, self.batch), weights, create_graph=True)
        along = [part.view(p.shape) for part, p in zip(v.split([p.numel() for p in weights]), weights, strict=True)]
        return torch.cat([part.flatten() for part in torch.autograd.grad(slopes, weights, along)])


def test_other_libraries_where_they_are_installed(short, monkeypatch):
    """Stand-ins with the interfaces of the real ones, which nobody needs to have."""
    stand_ins = {"curvlinops": "HessianLinearOperator", "hessian_eigenthings.operators": "HessianOperator"}
    for (module, name), cls in zip(stand_ins.items(), (Curvlinops, Eigenthings), strict=True):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: cls}))
    versions: dict[str, str | None] = {"curvlinops-for-pytorch": "3.0.1", "hessian-eigenthings": "1.0.0a5"}
    monkeypatch.setattr(libraries, "installed", versions.get)
    (case,) = products.cases(quick=True)
    found = {t.contestant: t for t in measure(case)}
    for name, release in versions.items():
        assert found[f"{name} {release}"].error is not None
    assert all(t.right for t in found.values())
    versions |= {"curvlinops-for-pytorch": "4.0.0", "hessian-eigenthings": None}
    assert not list(libraries.contestants(Drawn(SMALL.model_copy(update={"vocab": 3}), torch.float32)))


def test_the_page_is_what_the_record_says():
    record = json.loads((DOCS / "benchmarks.json").read_text())
    written = (DOCS / "benchmarks.md").read_text()
    assert written == page(record)
    tables = [block.splitlines() for block in written.split("\n\n") if block.startswith("| contestant")]
    assert sum(len(table) - 2 for table in tables) == len(record["rows"])
    assert len(tables) == written.count("\n## ") - 2  # and what limits each, and the bounds


def test_the_page_compares_with_ours_and_with_the_floor():
    rows = [
        {"case": "a", "size": "1", "contestant": name, "role": role, "seconds": seconds, "error": error}
        | {"peak_bytes": peak, "run_bytes": None}
        for name, role, seconds, error, peak in (
            ("dense", "ours", 0.002, 0.0, 1500000),
            ("autograd", "rival", 3.0, 1.25e-7, None),
            ("writing", "floor", 0.0005, None, None),
        )
    ]
    tight = [{"part": "outer", "tier": "swept", "pairs": 3, "median": 1.25, "largest": 2.5, "whole": None}]
    about = {"quick": False, "hess_version": "0", **environment()}
    lines = page({**about, "rows": rows, "tightness": tight}).splitlines()
    assert "| outer | swept | 3 | 1.25 | 2.5 | - |" in lines
    assert "| a | 1 | 2 ms | 3 s | 1500 | 4 |" in lines
    start = lines.index("## a: 1")
    assert lines[start + 4 :] == [
        "| dense (ours) | 2 ms | 1 | 4 | 1.5 | - | 0 |",
        "| autograd (rival) | 3 s | 1500 | 6000 | - | - | 1.2e-07 |",
        "| writing (floor) | 500 µs | 0.25 | 1 | - | - | - |",
    ]
    assert all(line.count("|") == 8 for line in lines[start + 2 :])


def test_how_tight_the_bounds_are_is_recorded_and_none_is_beaten():
    stored = json.loads((ROOT / "docs/benchmarks.json").read_text())["tightness"]
    found = tightness()
    for old, new in zip(stored, found, strict=True):
        assert old.keys() == new.keys()
        for name, value in new.items():
            assert old[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)
        if new["tier"] != "published":
            assert new["median"] >= 1 - 1e-9
