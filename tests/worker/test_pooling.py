"""Hidden states to a vector: nothing of it depends on how a prompt was cut into chunks."""

from __future__ import annotations

import numpy as np
import pytest
from worker_fakes import InjectedModel, make_runner, new_request, plan, run

from mainspring.base.messages import Pooling
from mainspring.worker.pooling import Pool, activated

STATES = np.random.default_rng(3).standard_normal((23, 16)).astype(np.float32)


def pooled(pooling: Pooling, *cuts: int, classifier=None) -> np.ndarray:
    pool = Pool(pooling, classifier)
    for chunk in np.split(STATES, cuts):
        pool.add(chunk)
    return pool.result()


@pytest.mark.parametrize("kind", ["last", "cls", "mean", "all"])
def test_chunks_change_no_bit(kind):
    whole = pooled(Pooling(kind))
    for cuts in ((1,), (22,), (4, 8, 12), tuple(range(1, 23))):
        assert pooled(Pooling(kind), *cuts).tobytes() == whole.tobytes()


def test_kinds():
    def raw(kind):
        return pooled(Pooling(kind, "none"), 5, 11)

    np.testing.assert_array_equal(raw("last"), STATES[-1])
    np.testing.assert_array_equal(raw("cls"), STATES[0])
    np.testing.assert_array_equal(raw("all"), STATES)
    np.testing.assert_allclose(raw("mean"), STATES.mean(axis=0), atol=1e-6)


def test_what_was_given_may_change_later():
    """The states are a view of the model's buffers, which the next step writes."""
    for kind in ("last", "cls", "mean", "all"):
        expected, states = pooled(Pooling(kind)), STATES.copy()
        pool = Pool(Pooling(kind))
        pool.add(states)
        states[:] = 0.0
        np.testing.assert_array_equal(pool.result(), expected)


def test_dimensions_are_cut_before_the_length_is_made_one():
    cut = pooled(Pooling("mean", dimensions=5))
    assert cut.shape == (5,)
    assert np.linalg.norm(cut) == pytest.approx(1.0, abs=1e-6)
    whole = pooled(Pooling("mean", "none"))
    np.testing.assert_allclose(cut, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)


def test_a_head_reads_one_vector_at_a_time():
    given = []

    def classifier(vector):
        given.append(vector)
        return vector[:3] * np.float32(2)

    probs = pooled(Pooling("cls", "softmax", classify=True), 7, classifier=classifier)
    [vector] = given
    np.testing.assert_array_equal(vector, STATES[0])
    expected = np.exp(2.0 * STATES[0, :3].astype(np.float64))
    np.testing.assert_allclose(probs, expected / expected.sum(), atol=1e-6)


def test_activations():
    np.testing.assert_allclose(activated(np.float32([3, 4]), "normalize"), [0.6, 0.8], atol=1e-7)
    np.testing.assert_array_equal(activated(np.zeros(2, np.float32), "normalize"), [0, 0])
    np.testing.assert_allclose(activated(np.float32([0, 2]), "sigmoid"), [0.5, 0.880797], atol=1e-6)
    assert activated(np.float32([1000, 0]), "softmax").tolist() == [1.0, 0.0]


def test_a_pooled_row_beside_one_that_samples():
    runner = make_runner(InjectedModel(50))
    requests = [new_request(0, [1, 2, 3], pooling=Pooling("mean")), new_request(1, [4, 5])]
    output = run(runner, plan({0: 3, 1: 2}, [1], new_requests=requests))
    assert output.pooled.keys() == {0}
    assert [len(tokens) for tokens in output.sampled_token_ids] == [0, 1]


def test_a_prompt_in_two_steps_and_a_slot_that_is_taken_again():
    runner = make_runner(InjectedModel(50))
    new = new_request(0, [1, 2, 3, 4], pooling=Pooling("all"))
    whole = run(runner, plan({0: 4}, [], new_requests=[new]))
    first = run(runner, plan({0: 3}, [], freed_slots=[0], new_requests=[new]))
    assert not first.pooled
    second = run(runner, plan({0: 1}, []))
    np.testing.assert_array_equal(second.pooled[0], whole.pooled[0])
    assert len(second.pooled[0]) == 4


def test_states_that_are_no_numbers_are_the_requests_own_fault():
    model = InjectedModel(50)
    runner = make_runner(model)
    forward = model.forward
    model.forward = lambda batch: forward(batch) * np.float32("nan")
    new = new_request(0, [1, 2], pooling=Pooling("mean"))
    output = run(runner, plan({0: 2}, [], new_requests=[new]))
    assert not output.pooled
    assert "not finite" in output.errors[0]
