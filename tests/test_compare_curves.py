"""tools/compare_curves.py finds that the curves are those of Transformers and PEFT, and would find that they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import attrs
import pytest
from compare_curves import BFLOAT16_MEAN, Comparison, compare, main, tiny_case
from compare_curves_adapters import PAIRS, largest_gap
from compare_curves_case import Curve
from compare_curves_ours import sample_order
from compare_curves_settings import SEEN, SETTINGS, TOLERANCE
from torch import linspace


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the comparison, of few steps, and return what it writes."""
    out = tmp_path_factory.mktemp("curves")
    status = main(["--cpu", "--steps", "6", "--json", str(out / "curves.json"), "--picture", str(out / "curves.svg")])
    report: dict[str, Any] = json.loads((out / "curves.json").read_text())
    return {**report, "status": status, "picture": (out / "curves.svg").read_text()}


@pytest.mark.parametrize("kind", ["canonical", "lora"])
def test_curves_are_those_of_peft(kind: str, report: dict[str, Any]) -> None:
    """Losses, validation, gradient norms and learning rates, with an A for each projection and with shared ones."""
    [found] = [one for one in report["comparisons"] if one["kind"] == kind]
    assert found["agrees"]
    assert max(found["difference"]["loss_max"], found["difference"]["validation_max"]) < 1e-4
    assert found["difference"]["grad_norm_max"] < 1e-3
    assert found["difference"]["learning_rate_max"] < 1e-12
    ours, [theirs] = found["ckptrain"], found["peft"]
    assert ours["learnt_tokens"] == theirs["learnt_tokens"]
    assert len(ours["losses"]) == 6
    assert ours["validation"].keys() == {"0", "5", "6"}
    assert max(theirs["grad_norms"]) > 0.5, "the gradient is clipped"
    assert theirs["losses"][-1] < theirs["losses"][0] - 0.1, "something is learnt"


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_means_what_peft_and_torch_mean(setting: str, report: dict[str, Any]) -> None:
    """It changes their curve, and ours with it."""
    [row] = [row for row in report["settings"] if row["setting"] == setting]
    assert row["effect"] > SEEN
    assert row["ours"] <= TOLERANCE
    assert row["agrees"]


@pytest.mark.parametrize("position", ["pre", "post"])
def test_dropout_falls_where_it_should(position: str, report: dict[str, Any]) -> None:
    """Input features before A, output features after B, and nothing where the validation samples are looked at."""
    rows = [row for row in report["settings"] if row["setting"] == f"dropout_position {position}"]
    columns, lines, validation = (row["ours"] for row in rows)
    hidden, untouched = (columns, lines) if position == "pre" else (lines, columns)
    assert 0.3 < hidden < 0.5
    assert untouched == 0
    assert validation == pytest.approx(rows[2]["expected"], abs=TOLERANCE)
    assert [row["agrees"] for row in rows] == [True, True, True]


def test_initial_values_are_distributed_as_torch_draws_them(report: dict[str, Any]) -> None:
    """Every method, of A and of B."""
    rows = [row for row in report["settings"] if "init_method" in row["setting"]]
    wanted = {f"lora_A_init_method {of_a}" for of_a, _ in PAIRS} | {f"lora_B_init_method {of_b}" for _, of_b in PAIRS}
    assert {row["setting"] for row in rows} == wanted
    assert [row["setting"] for row in rows if not row["agrees"]] == []


def test_the_picture_has_all_curves(report: dict[str, Any]) -> None:
    """Of two pairs: two curves of losses and of gradient norms, one of differences."""
    assert report["status"] == 0
    root = ET.fromstring(report["picture"])
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2 * (2 + 2 + 1)
    assert len(report["picture"]) < 300_000


def test_a_spoilt_setting_is_seen(tmp_path: Path) -> None:
    """Alpha twice as large on one side."""
    case = tiny_case(tmp_path, 4)
    found = compare(case, tmp_path, theirs=attrs.evolve(case, alpha=2 * case.alpha))
    assert not found.agrees
    assert found.difference.largest > 20 * TOLERANCE
    assert found.difference.same_tokens
    assert found.ours.losses[0] == pytest.approx(found.theirs[0].losses[0], abs=TOLERANCE), "B is zero"


def test_too_few_or_too_long_samples_are_refused(tmp_path: Path) -> None:
    """The order of a second epoch is not told, so there must be none."""
    case = tiny_case(tmp_path, 4)
    with pytest.raises(ValueError, match="32 samples and 36 are needed"):
        sample_order(attrs.evolve(case, steps=9))
    with pytest.raises(ValueError, match=r"longer than data\.sequence_length=64"):
        sample_order(attrs.evolve(case, longest_tokens=64))


def _curve(*losses: float) -> Curve:
    steps = len(losses)
    return Curve(
        losses=list(losses),
        grad_norms=[1.0] * steps,
        learning_rates=[1e-3] * steps,
        learnt_tokens=[7] * steps,
        validation={0: losses[0], steps: losses[-1]},
    )


def test_with_seeds_their_spread_is_the_measure_and_a_bound() -> None:
    """Ours must be as near to their first seed as the others are, and never further than the bound."""
    first = _curve(3.0, 2.0, 1.0)

    def agrees(ours: Curve, *others: Curve) -> bool:
        return Comparison(kind="canonical", ours=ours, theirs=[first, *others]).agrees

    near, far = _curve(3.0, 2.004, 1.0), _curve(3.0, 2.2, 1.2)
    assert agrees(near, far)
    assert not agrees(_curve(3.0, 2.002, 1.002), _curve(3.0, 2.001, 1.001)), "further than their seeds"
    assert not agrees(_curve(3.0, 2.0, 1.0 + 4 * BFLOAT16_MEAN), far), "further than the bound"
    assert not agrees(attrs.evolve(near, learnt_tokens=[7, 7, 8]), far), "other samples"
    assert not agrees(_curve(3.0, 2.0, 1.001)), "without seeds, no more than rounding"


def test_the_distance_of_distributions() -> None:
    """Nothing between a sample and itself, a half where half of it is moved away."""
    numbers = linspace(0, 1, 101)
    assert largest_gap(numbers, numbers) == 0
    assert largest_gap(numbers, numbers + 0.5) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    "words", [["--gpu"], ["--cpu", "--gpu"], [], ["--gpu", "--data", "d", "--validation", "v", "--seeds", "1"]]
)
def test_a_command_line_that_lacks_something_is_refused(words: list[str]) -> None:
    """With status 2, before anything is trained."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
