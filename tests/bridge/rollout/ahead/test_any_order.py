"""The same worlds, but what is on its way arrives in any order at all: hypothesis chooses, and shrinks what fails."""

import heapq

from hypothesis import settings, stateful
from hypothesis import strategies as st

from tests.bridge.rollout.ahead.invariants import check_moment
from tests.bridge.rollout.ahead.settings import setting_of
from tests.bridge.rollout.ahead.simulation import World


class AnyOrder(stateful.RuleBasedStateMachine):
    """Every pending event may be the next one; a kill may come at any time."""

    @stateful.initialize(seed=st.integers(0, 10**6))
    def begin(self, seed):
        self.world = World(setting_of(seed), seed)
        self.world.poke()

    @stateful.rule(choice=st.integers(0, 10))
    def something_arrives(self, choice):
        world = self.world
        events = [event for event in world.events if event[2] == world.generation]
        if events:
            event = sorted(events)[choice % len(events)]
            world.events.remove(event)
            heapq.heapify(world.events)
            event[3](*event[4])
            world.poke()
            check_moment(world)

    @stateful.rule()
    def the_process_is_killed(self):
        self.world.crash()
        self.world.poke()

    def teardown(self):
        """However it began, it comes to its end."""
        if hasattr(self, "world"):
            self.world.run()


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
