"""ToolAlpaca APIs and flat rows: real ones, and one damage for each code."""

from collections.abc import Mapping
from typing import Any

import pytest

from data_prep.shapes.base import RowRejectedError
from sdpo_core.records import Problem
from tests.data_prep.source_rows import REAL, SIMULATED, bundled, flat_rows, origin, outcomes, read, sample

AXOLOTL = bundled(SIMULATED)[0]
INSTANCES, ADDRESSES = sample("toolalpaca_instances.json")
DONE = INSTANCES["Instances"][0]
FLAT = flat_rows()[1]


def _items(row: Mapping[str, Any]) -> list[Problem | RowRejectedError]:
    return list(outcomes(row, origin("x/apis.json", line=4, domain="tooluse")))


def _first(row: Mapping[str, Any]) -> Problem:
    found = _items(row)[0]
    if isinstance(found, RowRejectedError):
        raise found
    return found


def _code(row: Mapping[str, Any]) -> str:
    with pytest.raises(RowRejectedError) as rejection:
        _first(row)
    return rejection.value.code


def _answer(**call: object) -> dict[str, object]:
    answers = [[{"Action": "getAxolotlFacts", "Action_Input": "{}", **call}], *AXOLOTL["Golden_Answers"][1:]]
    return {"Golden_Answers": answers}


def _instance(**change: object) -> dict[str, Any]:
    return {**INSTANCES, "Instances": [{**DONE, **change}]}


def _step(name: object, given: object) -> list[object]:
    return [[name, given, "a log"], "Status Code: 200. Response: {}"]


def test_api_gives_one_problem_for_each_request():
    items = _items(AXOLOTL)
    assert len(items) == len(AXOLOTL["Instructions"])
    problem = items[0]
    assert isinstance(problem, Problem)
    assert (problem.id, problem.source["idx"], problem.source["line"]) == ("d/s/apis/3/0", "apis/3/0", 4)
    assert problem.prompt[0].content.endswith(f"\nBegin!\nQuestion: {AXOLOTL['Instructions'][0]}")
    assert problem.label == '[{"arguments":{},"name":"getRandomAxolotlImage"}]'
    assert problem.reference["tool_names"] == list(AXOLOTL["Function_Projection"])
    assert problem.details == {"api": "Axolotl", "num_tools": 3, "num_calls": 1}


def test_api_names_a_rejected_request_and_goes_on():
    items = _items({**AXOLOTL, **_answer(Action="getDetails")})
    assert isinstance(items[0], RowRejectedError)
    assert items[0].note.startswith("request 0: got getDetails, expected a tool of the row: getRandomAxolotlImage")
    assert all(isinstance(item, Problem) for item in items[1:5])


def test_api_golds_without_access_keys_are_flagged():
    kept = [item for item in read(REAL, domain="tooluse") if isinstance(item, Problem)]
    redacted = [item for item in kept if "gold_value_redacted" in item.flags]
    assert len(redacted) == 30
    assert all("REDACTED" in item.label and "gold_value_not_in_request" in item.flags for item in redacted)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"Name": None}, "missing_field"),
        ({"Description": " "}, "missing_field"),
        ({"NLDocumentation": ["a"]}, "missing_field"),
        ({"Function_Description": None}, "missing_field"),
        ({"Function_Projection": ["getAxolotlFacts"]}, "missing_field"),
        ({"Function_Projection": {"getAxolotlFact": ["/", "get"]}}, "prompt_not_read"),
        ({"NLDocumentation": "nothing", "Function_Projection": {}}, "prompt_not_read"),
        ({"Instructions": []}, "missing_field"),
        ({"Instructions": "one"}, "missing_field"),
        ({"Golden_Answers": AXOLOTL["Golden_Answers"][1:]}, "answers_mismatch"),
        ({"Golden_Answers": {}}, "missing_field"),
        ({"Instructions": [7, *AXOLOTL["Instructions"][1:]]}, "missing_field"),
        ({"Golden_Answers": [[], *AXOLOTL["Golden_Answers"][1:]]}, "no_gold"),
        ({"Golden_Answers": [["x"], *AXOLOTL["Golden_Answers"][1:]]}, "missing_field"),
        (_answer(Action=None), "missing_field"),
        (_answer(Action_Input={"limit": 3}), "missing_field"),
        (_answer(Action_Input="${limit}"), "gold_has_placeholder"),
        (_answer(Action="[Optional]getAxolotlFacts"), "gold_tool_unknown"),
        (_answer(Action_Input="{'limit': 3}"), "gold_input_not_object"),
        (_answer(Action_Input="[]"), "gold_input_not_object"),
        (_answer(Action_Input='{"limit": 1, "limit": 2}'), "gold_input_not_object"),
        (_answer(Action_Input='{"limit": 1e999}'), "gold_input_not_object"),
        (_answer(Action_Input='{"limit": -Infinity}'), "gold_input_not_object"),
        (_answer(Action_Input='{"limit": "\\ud800"}'), "gold_input_not_object"),
        (_answer(Action_Input='{"a": ' + "[" * 60 + "]" * 60 + "}"), "gold_input_not_object"),
        (_answer(Action_Input='{"a": ' + "[" * 10**5), "gold_input_not_object"),
        (_answer(Action_Input='{"a": ' + "9" * 5000 + "}"), "gold_input_not_object"),
    ],
)
def test_api_refuses_damaged_rows(change, code):
    assert _code({**AXOLOTL, **change}) == code


def test_api_says_of_a_placeholder_before_an_unknown_tool():
    calls = [{"Action": "getDetails", "Action_Input": "{}"}, {"Action": "getAxolotlFacts", "Action_Input": "${x}"}]
    assert _code({**AXOLOTL, "Golden_Answers": [calls, *AXOLOTL["Golden_Answers"][1:]]}) == "gold_has_placeholder"


def test_api_without_gold_is_counted_request_by_request():
    for row in sample("toolalpaca_legacy.json"):
        items = _items(row)
        assert [item.code for item in items if isinstance(item, RowRejectedError)] == ["no_gold", "no_gold"]
        assert len(items) == 2


def test_answers_count_where_instances_stand_beside_them():
    both = {**AXOLOTL, "Instances": INSTANCES["Instances"]}
    assert _items(both) == _items(AXOLOTL)


def test_instances_give_their_steps_as_gold():
    problem = _first(ADDRESSES)
    assert [call["name"] for call in problem.reference["calls"]] == ["verifyUSAddress", "standardizeUSAddress"]
    assert problem.prompt[0].content.endswith(f"\nQuestion: {ADDRESSES['Instances'][0]['input']}")


def test_instances_leave_hints_and_questions_to_the_user_out():
    steps = [_step("getDetails", "which one?"), _step("searchUser", '{"query": "ada"}'), _step("getDetails", "{}")]
    problem = _first(_instance(input="Find ada.\nHint: ask the user.", intermediate_steps=steps))
    assert problem.prompt[0].content.endswith("\nQuestion: Find ada.")
    assert problem.reference["calls"] == [{"name": "searchUser", "arguments": {"query": "ada"}}]
    assert problem.flags == ()


def test_instances_need_no_final_thought():
    instance = {key: value for key, value in DONE.items() if key != "Final Thought"}
    assert _first({**INSTANCES, "Instances": [instance]}) == _first(INSTANCES)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"error": "Could not parse"}, "instance_error"),
        ({"intermediate_steps": []}, "instance_no_steps"),
        ({"intermediate_steps": None}, "instance_no_steps"),
        ({"intermediate_steps": [_step("searchUser", "{}")] * 6}, "instance_over_5_steps"),
        ({"intermediate_steps": [_step("getDetails", "{}")]}, "instance_only_asks"),
        ({"intermediate_steps": [["searchUser", "{}"]]}, "missing_field"),
        ({"intermediate_steps": [_step(3, "{}")]}, "missing_field"),
        ({"intermediate_steps": [_step("searchUser", "{}"), _step("searchUser", "ada")]}, "gold_input_not_object"),
        ({"intermediate_steps": [_step("inventUser", "{}")]}, "gold_tool_unknown"),
        ({"input": None}, "missing_field"),
        ({"input": "\nHint: all of it"}, "missing_field"),
    ],
)
def test_instances_refuse_damaged_rows(change, code):
    assert _code(_instance(**change)) == code


def test_instances_refuse_what_is_no_list_of_objects():
    assert _code({**INSTANCES, "Instances": ["x"]}) == "missing_field"
    assert _code({**INSTANCES, "Instances": []}) == "missing_field"


def test_five_steps_are_kept():
    problem = _first(_instance(intermediate_steps=[_step("searchUser", "{}")] * 5))
    assert problem.details["num_calls"] == 5
    assert problem.flags == ("several_calls",)


def test_flat_row_keeps_its_response_for_a_teacher():
    problem = _first({**FLAT, "golden_response": ["Thought: easy.", "", "Action: x"]})
    assert problem.privileged == "Thought: easy.\nAction: x"
    assert problem.id == "d/s/apis/3"
    assert _first({key: value for key, value in FLAT.items() if key != "golden_response"}).privileged is None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"prompt": None}, "missing_field"),
        ({"prompt": "Question: what?"}, "prompt_not_read"),
        ({"nl_documentation": "no tools"}, "prompt_not_read"),
        ({"instruction": "another one"}, "prompt_not_read"),
        ({"golden_answer": []}, "no_gold"),
        ({"golden_answer": "[]"}, "no_gold"),
        ({"golden_answer": [{"Action": "getDetails", "Action_Input": "{}"}]}, "gold_tool_unknown"),
        ({"golden_response": "text"}, "missing_field"),
        ({"golden_response": [3]}, "missing_field"),
    ],
)
def test_flat_refuses_damaged_rows(change, code):
    assert _code({**FLAT, **change}) == code


@pytest.mark.parametrize(("declared", "domain"), [("tooluse", "tooluse"), (None, "own")])
def test_rows_that_name_no_domain_take_the_data_sets_or_are_a_users_own(declared, domain):
    (found,) = outcomes(FLAT, origin(domain=declared))
    assert isinstance(found, Problem)
    assert found.domain == domain
