"""Laws of state machines (controllers, schedules, multipliers, archives), generated over rl_fn's public functions.

A machine is pure, the same compiled, mapped and scanned, goes on from a checkpoint as if nothing had happened, and a
measurement that is not a number does not move it.
"""

import copy
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.laws import quick_jit
from tests.rl_fn.machines import CONSTRUCTORS, MACHINES, is_machine

STEPS = 12
# What a schedule measures does not matter: NaN is a step as any other.
COUNTS = {"scheduled_kl"}


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def close(a, b):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7)


def inputs(key, seed=0, steps=STEPS):
    rng = np.random.default_rng(seed)
    return [MACHINES[key].inputs(rng) for _ in range(steps)]


def stepper(key):
    return getattr(MACHINES[key].make(), MACHINES[key].step)


def run(step, state, measured):
    states = []
    for x in measured:
        state = step(state, *x)
        states.append(state)
    return states


def test_every_machine_is_here():
    """A new function that returns an init/update pair fails here until machines.py knows how to make one."""
    assert {machine.name for machine in MACHINES.values()} == set(CONSTRUCTORS)


def test_what_a_machine_is_goes_by_its_return_type():
    assert is_machine(rl_fn.pid_kl) and is_machine(rl_fn.pareto_archive) and not is_machine(rl_fn.gae)
    tuples = [x for x in map(rl_fn.__dict__.get, rl_fn.__all__) if inspect.isclass(x) and "init" in dir(x)]
    returned = {inspect.signature(getattr(rl_fn, name)).return_annotation for name in CONSTRUCTORS}
    assert set(tuples) == returned


@pytest.mark.parametrize("key", MACHINES)
def test_measurements_move_it(key):
    """Or the laws below would say nothing; a fixed coefficient is fixed."""
    machine, states = MACHINES[key].make(), run(stepper(key), MACHINES[key].make().init(), inputs(key))
    moved = [any((x != y).any() for x, y in zip(leaves(machine.init()), leaves(s), strict=True)) for s in states]
    assert any(moved) != (key == "fixed_kl")


@pytest.mark.parametrize("key", MACHINES)
def test_it_is_pure(key):
    """The same from the same state, however often and whatever else was done in between; nothing given is changed."""
    machine, other = MACHINES[key].make(), MACHINES[key].make()
    equal(machine.init(), other.init())
    step, measured = getattr(machine, MACHINES[key].step), inputs(key)
    first = run(step, machine.init(), measured)
    before, given = copy.deepcopy(first[3]), copy.deepcopy(measured[4])
    run(step, first[3], inputs(key, seed=1))
    equal(step(first[3], *measured[4]), first[4])
    equal(before, first[3])
    equal(given, measured[4])
    for a, b in zip(first, run(getattr(other, MACHINES[key].step), other.init(), measured), strict=True):
        equal(a, b)
    equal(machine.init(), other.init())


@pytest.mark.parametrize("key", MACHINES)
def test_the_state_keeps_its_types(key):
    state = MACHINES[key].make().init()
    for new in run(stepper(key), state, inputs(key)):
        assert jax.tree.structure(state) == jax.tree.structure(new)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
            assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


@pytest.mark.parametrize("key", MACHINES)
def test_jit_and_eager_agree(key):
    step, measured, state = stepper(key), inputs(key), MACHINES[key].make().init()
    for a, b in zip(run(step, state, measured), run(quick_jit(step), state, measured), strict=True):
        close(a, b)


@pytest.mark.parametrize("key", MACHINES)
def test_vmap_is_a_loop_and_scan_is_one_too(key):
    step, init = stepper(key), MACHINES[key].make().init()
    runs = [inputs(key, seed) for seed in range(3)]
    expected = [run(step, init, measured) for measured in runs]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[jax.tree.map(lambda *x: np.stack(x), *m) for m in runs])

    def scanned(measured):
        def one(state, x):
            new = step(state, *x)
            return new, new

        return jax.lax.scan(one, init, measured)[1]

    mapped = quick_jit(jax.vmap(scanned))(stacked)
    for i, states in enumerate(expected):
        for t, state in enumerate(states):
            close(jax.tree.map(lambda x, i=i, t=t: x[i, t], mapped), state)


@pytest.mark.parametrize("key", MACHINES)
def test_a_checkpointed_state_goes_on_identically(key, tmp_path):
    """Flattened, saved, and put into the structure that a new machine's init has."""
    measured, half = inputs(key), STEPS // 2
    states = run(stepper(key), MACHINES[key].make().init(), measured)
    np.savez(tmp_path / "state.npz", *jax.tree.leaves(states[half - 1]))
    fresh = MACHINES[key].make()
    with np.load(tmp_path / "state.npz") as saved:
        restored = jax.tree.unflatten(jax.tree.structure(fresh.init()), [jnp.asarray(saved[name]) for name in saved])
    equal(restored, states[half - 1])
    for a, b in zip(run(stepper(key), restored, measured[half:]), states[half:], strict=True):
        equal(a, b)


@pytest.mark.parametrize("key", MACHINES)
def test_a_measurement_that_is_not_a_number_changes_nothing(key):
    step, measured = stepper(key), inputs(key)
    nothing = tuple(np.full_like(x, np.nan) if x.dtype == np.float32 else x for x in measured[0])
    for state in run(step, MACHINES[key].make().init(), measured):
        if MACHINES[key].name in COUNTS:
            equal(step(state, *nothing), step(state, *measured[0]))
        else:
            equal(step(state, *nothing), state)


@pytest.mark.parametrize("key", MACHINES)
def test_infinite_measurements_leave_finite_states(key):
    step, state = stepper(key), MACHINES[key].make().init()
    for sign in (np.inf, -np.inf, np.inf):
        for template in inputs(key, steps=2):
            x = tuple(np.full_like(x, sign) if x.dtype == np.float32 else x for x in template)
            state = step(step(state, *x), *template)
            assert all(np.isfinite(leaf).all() for leaf in leaves(state))
