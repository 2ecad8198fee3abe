"""The local engine: inverse-transform oracle, log-probabilities of the policy, independence of neighbours."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sdpo_core import random_streams
from sdpo_core.backends.base import TokenRow
from sdpo_core.backends.hf import hf_policy
from sdpo_core.backends.row_model import RowModel
from sdpo_core.errors import DataError, SpecError
from sdpo_core.records import Rollout
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.rollout.local import LocalEngine, _draw, load_engine
from sdpo_core.specs import CellSpec, OptimizerSpec
from tests.sdpo_core.micro import Base, load_model, make_spec, ragged_rows

END = 258  # the end token of the byte tokenizer


def make_engine(base: Base, *, end_id: int = END, max_tokens: int = 10_000) -> LocalEngine:
    return LocalEngine(load_model(base.folder), end_id=end_id, max_tokens=max_tokens)


def requests(count: int = 12) -> list[RolloutRequest]:
    """Ragged prompts, some shared, each with a stream of its own."""
    prompts = [row.prompt_ids for row in ragged_rows()]
    return [
        RolloutRequest(prompt_ids=prompts[i % len(prompts)], stream_key=random_streams.stream_key(3, "x", i))
        for i in range(count)
    ]


def by_hand(base: Base, request: RolloutRequest, *, sampling: Sampling, end_id: int = END) -> tuple[int, ...]:
    """One plain forward a token, in float64: the first id whose cumulative probability exceeds the uniform number."""
    model = load_model(base.folder, dtype=torch.float64)
    uniforms = np.random.Generator(np.random.Philox(key=request.stream_key)).random(sampling.max_response_tokens)
    ids = list(request.prompt_ids)
    for uniform in uniforms:
        with torch.no_grad():
            logits = model.model(input_ids=torch.tensor([ids])).logits[0, -1, :259]
        probabilities = (logits / sampling.temperature).softmax(dim=0).tolist()
        total, token = 0.0, -1
        for token, mass in enumerate(probabilities):  # noqa: B007
            total += mass
            if total > uniform:
                break
        ids.append(token)
        if token == end_id:
            break
    return tuple(ids[len(request.prompt_ids) :])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_rollouts_are_the_inverse_transform_of_their_streams(base: Base, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, max_response_tokens=4)
    asked = requests(6)
    found = make_engine(base).generate(asked, sampling=sampling)
    assert [rollout.response_ids for rollout in found] == [by_hand(base, one, sampling=sampling) for one in asked]
    assert [rollout.prompt_ids for rollout in found] == [one.prompt_ids for one in asked]


def test_first_tokens_follow_the_softmax(base: Base) -> None:
    """2,000 draws of one token: chi-square over the cells with an expectation above 5, at 5 standard deviations."""
    prompt, count = (20, 30, 40), 2_000
    asked = [RolloutRequest(prompt_ids=prompt, stream_key=random_streams.stream_key(1, "y", i)) for i in range(count)]
    sampling = Sampling(temperature=0.8, max_response_tokens=1)
    found = make_engine(base).generate(asked, sampling=sampling)
    with torch.no_grad():
        logits = load_model(base.folder).model(input_ids=torch.tensor([prompt])).logits[0, -1, :259]
    expected = (logits / 0.8).softmax(dim=0).numpy().astype(np.float64) * count
    counts = np.bincount([rollout.response_ids[0] for rollout in found], minlength=259)
    large = expected > 5
    assert large.sum() > 20
    cells = np.append(expected[large], expected[~large].sum())
    observed = np.append(counts[large], counts[~large].sum())
    statistic = float(((observed - cells) ** 2 / cells).sum())
    degrees = len(cells) - 1
    assert abs(statistic - degrees) < 5 * np.sqrt(2 * degrees)


def test_sampling_logps_are_the_policys(base: Base) -> None:
    """Sampler and trainer see one distribution: log-probabilities agree to float32 rounding."""
    temperature = 0.7
    found = make_engine(base).generate(requests(), sampling=Sampling(temperature=temperature, max_response_tokens=6))
    optimizer = OptimizerSpec(learning_rate=1e-3)
    policy = hf_policy(load_model(base.folder), optimizer, temperature=temperature, max_tokens=10_000)
    rows = [TokenRow(prompt_ids=rollout.prompt_ids, response_ids=rollout.response_ids) for rollout in found]
    for rollout, score in zip(found, policy.score(rows, top_k=0), strict=True):
        np.testing.assert_allclose(rollout.sampling_logps, score.logps, rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 45, 10_000])
def test_rollouts_do_not_depend_on_their_neighbours(base: Base, max_tokens: int) -> None:
    """Alone, in another order or in batches of another size: the same ids; log-probabilities to matmul rounding."""
    sampling = Sampling(temperature=1.0, max_response_tokens=5)
    asked = requests()
    alone = [make_engine(base).generate([one], sampling=sampling)[0] for one in asked[:4]]
    turned = make_engine(base, max_tokens=max_tokens).generate(asked[::-1], sampling=sampling)[::-1]
    for one, other in zip(alone, turned[:4], strict=True):
        assert one.response_ids == other.response_ids
        np.testing.assert_allclose(one.sampling_logps, other.sampling_logps, rtol=0, atol=1e-5)


def test_same_requests_give_the_same_rollouts_bit_for_bit(base: Base) -> None:
    engine, sampling = make_engine(base), Sampling(temperature=1.0, max_response_tokens=5)
    assert engine.generate(requests(), sampling=sampling) == engine.generate(requests(), sampling=sampling)


def test_another_stream_key_gives_another_rollout(base: Base) -> None:
    """The two rollouts of a prompt differ in nothing but their keys."""
    asked = [RolloutRequest(prompt_ids=(5, 6, 7), stream_key=key) for key in (1, 2)]
    one, other = make_engine(base).generate(asked, sampling=Sampling(temperature=1.0, max_response_tokens=5))
    assert one.response_ids != other.response_ids


def test_end_token_closes_a_rollout_and_is_part_of_it(base: Base) -> None:
    """Any id may be the end token: the one that stands third in an endless rollout ends it there."""
    sampling = Sampling(temperature=1.0, max_response_tokens=6)
    asked = requests(8)
    endless: tuple[Rollout, ...] = make_engine(base, end_id=-1).generate(asked, sampling=sampling)
    assert {rollout.finish for rollout in endless} == {"length"}
    assert {len(rollout.response_ids) for rollout in endless} == {6}
    end = endless[0].response_ids[2]
    for whole, cut in zip(endless, make_engine(base, end_id=end).generate(asked, sampling=sampling), strict=True):
        length = whole.response_ids.index(end) + 1 if end in whole.response_ids else 6
        assert cut.response_ids == whole.response_ids[:length]
        np.testing.assert_allclose(cut.sampling_logps, whole.sampling_logps[:length], rtol=0, atol=1e-6)
        assert cut.finish == ("stop" if end in whole.response_ids else "length")


def test_a_batch_stops_when_every_rollout_has_ended(base: Base) -> None:
    """The stop at the last possible token is a stop."""
    asked = requests(1)
    whole = make_engine(base, end_id=-1).generate(asked, sampling=Sampling(temperature=1.0, max_response_tokens=3))
    end = whole[0].response_ids[2]
    engine = make_engine(base, end_id=end)
    for limit in (3, 40):
        (rollout,) = engine.generate(asked, sampling=Sampling(temperature=1.0, max_response_tokens=limit))
        assert (rollout.response_ids, rollout.finish) == (whole[0].response_ids, "stop")


def test_low_temperature_samples_the_best_token(base: Base) -> None:
    (rollout,) = make_engine(base).generate(requests(1), sampling=Sampling(temperature=1e-3, max_response_tokens=1))
    with torch.no_grad():
        logits = load_model(base.folder).model(input_ids=torch.tensor([rollout.prompt_ids])).logits[0, -1]
    assert rollout.response_ids == (int(logits[:259].argmax()),)
    assert rollout.sampling_logps[0] == pytest.approx(0.0, abs=1e-6)


def test_draw_takes_no_token_without_mass() -> None:
    """Masses 0, 1/2, 0, 1/2, 0 at both ends of the unit interval and at the step between."""
    logits = torch.tensor([[-1e9, 0.0, -1e9, 0.0, -1e9]]).expand(4, -1)
    uniforms = torch.tensor([0.0, 0.5 - 2**-50, 0.5, 1 - 2**-53], dtype=torch.float64)
    ids, logps = _draw(logits, uniforms)
    assert ids.tolist() == [1, 1, 3, 3]
    torch.testing.assert_close(logps, torch.full((4,), 0.5).log())


def test_padded_vocabulary_is_never_sampled(base: Base) -> None:
    """The three rows beyond the tokenizer hold weights like any other."""
    asked = [RolloutRequest(prompt_ids=(1, 2), stream_key=i) for i in range(400)]
    found = make_engine(base).generate(asked, sampling=Sampling(temperature=50.0, max_response_tokens=4))
    tokens = {token for rollout in found for token in rollout.response_ids}
    assert max(tokens) == END
    assert len(tokens) > 250


def test_rollouts_carry_the_version_of_their_weights(base: Base) -> None:
    engine, sampling = make_engine(base), Sampling(temperature=1.0, max_response_tokens=1)
    (before,) = engine.generate(requests(1), sampling=sampling)
    engine._model.blend(engine._model.weights(), rate=0.5)
    (after,) = engine.generate(requests(1), sampling=sampling)
    assert (before.weights_version, after.weights_version) == (0, 1)


def test_request_that_cannot_fit_is_refused(base: Base) -> None:
    request = RolloutRequest(prompt_ids=(1,) * 250, stream_key=1)
    make_engine(base).generate([request], sampling=Sampling(temperature=1.0, max_response_tokens=6))
    with pytest.raises(DataError, match="a sequence of 257 tokens, expected at most 256"):
        make_engine(base).generate([request], sampling=Sampling(temperature=1.0, max_response_tokens=7))


def test_request_without_a_whole_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="got 1 prompt ids, expected at least 2"):
        RolloutRequest(prompt_ids=(1,), stream_key=1)


def test_local_engine_refuses_another_backend(base: Base, cell_spec: CellSpec) -> None:
    """Another kind of model offers no continuation of a prompt."""
    policy = hf_policy(load_model(base.folder), OptimizerSpec(learning_rate=1.0), temperature=1.0, max_tokens=1)
    policy.model = Mock(spec=RowModel)
    with pytest.raises(SpecError, match="got a Mock for engine 'local', expected the HfModel"):
        load_engine(make_spec(cell_spec), policy=policy, folder=base.folder, device="cpu")
