"""The reference's prompts and golds from the raw files, and what becomes of every raw row."""

import json
from collections import Counter
from collections.abc import Sequence

import pytest

from data_prep.shapes.base import RowRejectedError
from sdpo_core.records import Problem
from tests.data_prep.source_rows import (
    RAW,
    REAL,
    SIMULATED,
    TOOL_USE,
    bundled,
    flat_rows,
    origin,
    outcomes,
    raw_files,
    read,
    reference,
    sample,
)

# The reference numbers a domain's rows in the order of these files.
ORDER = {
    "biology": (
        "Biology",
        "GB1_ftness_prediction",
        "fluorescence_prediction",
        "beta_lactamase_activity_prediction",
        "Protein_Protein_Interaction",
        "stability_prediction",
    ),
    "chemistry": (
        "Chemistry",
        "molecule_structure_prediction",
        "molar_weight_calculation",
        "molecular_property_calculation",
        "retrosynthesis",
        "reaction_prediction",
    ),
    "material": (
        "Material",
        "diffusion_rate_analysis",
        "lattice_volume_calculation",
        "perovskite_stability_prediction",
        "valence_electron_difference_calculation",
    ),
    "physics": ("Physics", "general_physics_calculation"),
}
ROWS = {"biology": 500, "chemistry": 2100, "material": 935, "physics": 800}
# Rows of the reference that are not kept from the raw files, by file and line from 0: the reference pairs five texts
# with four labels, and keeps golds that stand under two labels.
REJECTED = {
    ("perovskite_stability_prediction", 59): "choices_mismatch",
    ("general_physics_calculation", 237): "gold_under_two_labels",
    ("general_physics_calculation", 632): "gold_under_two_labels",
    ("general_physics_calculation", 691): "gold_under_two_labels",
}
# Per file: rows by task, or by code where they are not kept.
COUNTS = {
    "Biology/GB1_ftness_prediction": {"mcq": 100},
    "Biology/Protein_Protein_Interaction": {"mcq": 100},
    "Biology/beta_lactamase_activity_prediction": {"mcq": 100},
    "Biology/fluorescence_prediction": {"mcq": 100},
    "Biology/solubility_prediction": {"true_false": 100},
    "Biology/stability_prediction": {"mcq": 100},
    "Chemistry/balancing_chemical_equation": {"type_not_supported": 300},
    "Chemistry/molar_weight_calculation": {"mcq": 600},
    "Chemistry/molecular_property_calculation": {"mcq": 500},
    "Chemistry/molecule_structure_prediction": {"mcq": 300},
    "Chemistry/reaction_prediction": {"mcq": 400},
    "Chemistry/retrosynthesis": {"mcq": 300},
    "Material/diffusion_rate_analysis": {"mcq": 149},
    "Material/lattice_volume_calculation": {"mcq": 160},
    "Material/perovskite_stability_prediction": {"mcq": 479, "choices_mismatch": 1},
    "Material/valence_electron_difference_calculation": {"mcq": 146},
    "Physics/general_physics_calculation": {"mcq": 797, "gold_under_two_labels": 3},
    "Physics/physics_formula_derivation": {"level_not_l3": 218},
}
# Lines from 0 of the rows whose question announces data that it does not hold.
DATA_BLOCK_MISSING = {
    "diffusion_rate_analysis": [6, 57, 65, 69, 71, 77, 128],
    "lattice_volume_calculation": [128, 143],
    "perovskite_stability_prediction": [94],
    "valence_electron_difference_calculation": [23],
}


def _kinds(items: Sequence[Problem | RowRejectedError]) -> Counter[str]:
    return Counter(item.task if isinstance(item, Problem) else item.code for item in items)


def _flags(items: Sequence[Problem | RowRejectedError]) -> Counter[str]:
    return Counter(flag for item in items if isinstance(item, Problem) for flag in item.flags)


@pytest.mark.parametrize("domain", ORDER)
def test_raw_rows_rebuild_every_reference_prompt_and_gold(domain):
    """Row idx of the reference is row idx of the raw files; 4,335 of 4,335 over the four domains."""
    folder, *files = ORDER[domain]
    raw = [(name, line, row) for name in files for line, row in enumerate(bundled(f"{RAW}/{folder}/{name}.jsonl"))]
    assert (
        len(raw)
        == len(reference(domain))
        == {"biology": 500, "chemistry": 2100, "material": 935, "physics": 800}[domain]
    )
    for idx, (there, (name, line, row)) in enumerate(zip(reference(domain), raw, strict=True)):
        # The reference's own construction; zip drops a fifth text.
        options = zip(row["choices"]["label"], row["choices"]["text"], strict=False)
        listed = "\n".join(f"{label}: {text}" for label, text in options)
        prompt = f"{row['question']}\n\n{listed}\nPlease reason step by step."
        assert (there["idx"], there["prompt"], there["answer"]) == (idx, prompt, row["answerKey"])
        (found,) = outcomes(row, origin(f"{name}.jsonl", line=line + 1))
        (twin,) = outcomes(there, origin(domain="x"))
        if isinstance(found, RowRejectedError):
            assert REJECTED[name, line] == found.code
            continue
        assert (name, line) not in REJECTED
        assert isinstance(twin, Problem)
        assert (found.prompt[1].content, found.label) == (there["prompt"], there["answer"])
        assert (found.reference, found.group_key) == (twin.reference, twin.group_key)
        if len(found.reference["choices"]) == 4:
            assert (found.prompt[0].content, found.flags) == (there["system"], twin.flags)
        else:
            assert found.flags == ()
            assert twin.flags == ("two_options_under_four_option_prompt",)


def test_raw_tool_requests_rebuild_every_reference_prompt():
    """The 68 reference rows are the simulated requests without `$` in their gold, prompt for prompt, call for call."""
    rows = {row["prompt"]: row for row in bundled(TOOL_USE)}
    assert len(rows) == 68
    place = origin(SIMULATED, domain="tooluse")
    kept = [item for item in read(SIMULATED, domain="tooluse") if isinstance(item, Problem)]
    prompts = [item.prompt[0].content for item in kept]
    # Beside them, one request whose password holds a lone `$`.
    assert len(set(prompts)) == 66
    assert len(set(prompts) & set(rows)) == 65
    for item in kept:
        if item.prompt[0].content in rows:
            (twin,) = outcomes(rows[item.prompt[0].content], place)
            assert isinstance(twin, Problem)
            assert (item.label, item.reference, item.group_key, item.flags, item.details) == (
                twin.label,
                twin.reference,
                twin.group_key,
                twin.flags,
                twin.details,
            )
    # The three whose gold names a tool that is not offered are not kept; their prompts are rebuilt with another gold.
    rest = set(rows) - set(prompts)
    for api in bundled(SIMULATED):
        tool = next(iter(api["Function_Projection"]))
        free = {**api, "Golden_Answers": [[{"Action": tool, "Action_Input": "{}"}]] * len(api["Instructions"])}
        rest -= {item.prompt[0].content for item in outcomes(free, place) if isinstance(item, Problem)}
    assert rest == set()
    assert len(set(rows) - set(prompts)) == 3


@pytest.mark.parametrize("path", raw_files())
def test_raw_files_give_the_known_counts(path):
    assert _kinds(read(path)) == COUNTS[path.removeprefix(f"{RAW}/").removesuffix(".jsonl")]


def test_raw_files_are_complete():
    assert [path.removeprefix(f"{RAW}/").removesuffix(".jsonl") for path in raw_files()] == list(COUNTS)
    total = sum((_kinds(read(path)) for path in raw_files()), Counter())
    kept = {"mcq": 4331, "true_false": 100}
    codes = {"type_not_supported": 300, "level_not_l3": 218, "choices_mismatch": 1, "gold_under_two_labels": 3}
    assert total == {**kept, **codes}
    assert total.total() == 4953
    golds = Counter(
        item.label for item in read(f"{RAW}/Biology/solubility_prediction.jsonl") if isinstance(item, Problem)
    )
    assert golds == {"Yes": 46, "No": 54}


def test_raw_files_flag_the_known_lines():
    missing: dict[str, list[int]] = {}
    equal = []
    for path in raw_files():
        for item in read(path):
            if isinstance(item, Problem):
                name, line = item.id.split("/")[-2:]
                if "data_block_missing" in item.flags:
                    missing.setdefault(name, []).append(int(line))
                if "equal_options" in item.flags:
                    equal.append((name, int(line)))
    assert missing == DATA_BLOCK_MISSING
    assert equal == [("general_physics_calculation", line) for line in (256, 266, 321)]


def test_reference_rows_of_both_splits_are_kept_but_for_three():
    items = [item for domain in ORDER for row in reference(domain) for item in outcomes(row, origin(domain="x"))]
    assert _kinds(items) == {"mcq": 4332, "gold_under_two_labels": 3}
    assert _flags(items) == {
        "two_options_under_four_option_prompt": 200,
        "data_block_missing": 11,
        "equal_options": 3,
    }


def test_tool_files_give_the_known_counts():
    """100 simulated requests: 31 with placeholders, 3 of the others with a tool that is not offered."""
    simulated, real = (read(path, domain="tooluse") for path in (SIMULATED, REAL))
    assert _kinds(simulated) == {"tool_call": 66, "gold_has_placeholder": 31, "gold_tool_unknown": 3}
    assert _flags(simulated) == {"gold_value_not_in_request": 19, "several_calls": 16, "empty_string_in_gold": 4}
    # 114 real requests: 4 golds are not JSON, 6 name tools that the documentation does not.
    assert _kinds(real) == {"tool_call": 104, "gold_tool_unknown": 6, "gold_input_not_object": 4}
    assert _flags(real) == {"gold_value_not_in_request": 46, "several_calls": 17, "gold_value_redacted": 30}


def test_tool_files_hold_the_calls_that_are_known_of_them():
    """Requests by number of calls; inputs that are no JSON; calls of a tool that the API has not."""
    found = []
    for path in (SIMULATED, REAL):
        golds = [(api, gold) for api in bundled(path) for gold in api["Golden_Answers"]]
        calls = [(api, call) for api, gold in golds for call in gold]
        names = Counter(call["Action"] for api, call in calls if call["Action"] not in api["Function_Projection"])
        broken = sum(not _is_json(call["Action_Input"]) for _, call in calls)
        found.append((Counter(len(gold) for _, gold in golds), len(calls), broken, names["getDetails"], names.total()))
    assert found == [({1: 57, 2: 35, 3: 6, 4: 1, 5: 1}, 154, 32, 8, 9), ({1: 94, 2: 13, 3: 6, 5: 1}, 143, 4, 0, 6)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_reference_tool_rows_have_the_known_flags_when_every_tool_is_offered():
    """21 of the 68 golds hold a value that the request does not, 19 several calls; 2 and 3 of these are not kept."""
    described = "\n{0}: made for this test.\nParameters: {{}}\nOutput: none.".format
    extra = ("getDetails", "[Optional]updateUserProfile")
    prompts = {row["prompt"].rpartition("\nQuestion: ")[2] for row in bundled(TOOL_USE)}
    items: list[Problem | RowRejectedError] = []
    for api in bundled(SIMULATED):
        documentation = api["NLDocumentation"].rstrip("\n") + "".join(map(described, extra))
        row = {**api, "NLDocumentation": documentation, "Function_Projection": {}}
        made = [item for item in outcomes(row, origin(domain="tooluse")) if isinstance(item, Problem)]
        items += [item for item in made if item.prompt[0].content.rpartition("\nQuestion: ")[2] in prompts]
    assert len(items) == 68
    assert _flags(items) == {"gold_value_not_in_request": 21, "several_calls": 19, "empty_string_in_gold": 4}


def test_flat_rows_are_the_reference_rows():
    place = origin(domain="tooluse")
    flat = [item for row in flat_rows() for item in outcomes(row, place)]
    there = [item for row in bundled(TOOL_USE) for item in outcomes(row, place)]
    assert len(flat) == 68
    assert _kinds(flat) == _kinds(there) == {"tool_call": 65, "gold_tool_unknown": 3}
    for item, twin in zip(flat, there, strict=True):
        if isinstance(item, Problem) and isinstance(twin, Problem):
            assert (item.prompt, item.label, item.reference) == (twin.prompt, twin.label, twin.reference)
            assert (item.group_key, item.flags, item.privileged) == (twin.group_key, twin.flags, None)
        else:
            assert type(item) is type(twin)


def test_samples_give_the_known_counts():
    found = {
        name: _kinds([item for row in sample(name) for item in outcomes(row, origin(domain=domain))])
        for name, domain in (
            ("sciknoweval_v1.jsonl", None),
            ("sciknoweval_prerelease.jsonl", None),
            ("toolalpaca_instances.json", "tooluse"),
            ("toolalpaca_legacy.json", "tooluse"),
        )
    }
    assert found == {
        "sciknoweval_v1.jsonl": {"mcq": 6, "true_false": 1, "gold_under_two_labels": 1, "type_not_supported": 1},
        "sciknoweval_prerelease.jsonl": {"mcq": 4, "true_false": 1, "type_not_supported": 1},
        "toolalpaca_instances.json": {"tool_call": 5, "instance_error": 1, "instance_over_5_steps": 1},
        "toolalpaca_legacy.json": {"no_gold": 4},
    }


def test_ids_are_unique_and_survive_as_json():
    items = [
        item for path in (*raw_files(), SIMULATED, REAL) for item in read(path, domain=None if RAW in path else "t")
    ]
    problems = [item for item in items if isinstance(item, Problem)]
    assert len({item.id for item in problems}) == len(problems) == 4431 + 66 + 104
    for item in problems:
        line = json.dumps(item.to_json(), ensure_ascii=False, allow_nan=False)
        assert Problem.from_json(json.loads(line), where="x") == item
