"""A module of the user's own in one process: made, loaded, freed, synchronised, moved, saved, and what is refused."""

import copy

import pytest
import torch

from rl_bridge.checkpoints import Checkpointer
from rl_bridge.engines import Engine, InferenceEngine, Mesh, NeedParallel, ParallelModule, TrainEngine, returns
from rl_bridge.weights.source import in_charge_of
from tests.bridge.engines import own
from tests.support.many_hosts import ManyHosts


def module_of(engine):
    return engine.executor._host.workers[engine.name].module


def step(engine):
    loss = engine.train_step(NeedParallel(own.tokens()), 4 * (own.WIDTH - 1))
    engine.optimizer_step()
    return loss


def weights(engine):
    return {name: value.clone() for name, value in module_of(engine).state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(params=own.FACTORIES)
def factory(request):
    return own.FACTORIES[request.param]


@pytest.fixture
def engine(factory):
    return built(factory)


def built(factory, seed=0):
    torch.manual_seed(seed)
    return TrainEngine(factory).build()


def test_every_way_to_write_a_module_trains(engine):
    """ENG-21: RLite's way, with ParallelModule before the model's class and without it."""
    losses = [step(engine) for _ in range(3)]
    assert losses == sorted(losses, reverse=True) and losses[2] < losses[0] - 1e-2


def test_after_freed_weights_came_back_training_goes_on_as_if_they_had_never_been_freed(factory):
    """ENG-6, and for a plain module ENG-22: the optimiser follows, with its state."""
    freed, kept = built(factory), built(factory, seed=1)
    kept.sync_weights(freed)
    for engine in (freed, kept):
        step(engine)
    freed.meta()
    assert freed.device.type == "meta"
    kept.sync_weights(freed)
    before = weights(freed)
    losses = [[step(engine) for _ in range(2)] for engine in (freed, kept)]
    assert losses[0] == losses[1] and same(weights(freed), weights(kept)) and not same(weights(freed), before)


def test_freed_weights_are_refused_by_every_method(engine):
    engine.meta()
    for _ in range(2):
        with pytest.raises(ValueError, match="the weights here are incomplete: they were freed"):
            step(engine)
        with pytest.raises(ValueError, match="the weights here are incomplete: they were freed"):
            engine.sync_weights(built(own.Line))
        engine.cpu()


def test_a_checkpoint_gives_back_all_that_the_next_step_depends_on(factory, tmp_path):
    """ENG-10: kill and resume of the docs' own classes."""
    trained, other = built(factory), built(factory, seed=1)
    step(trained)
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    path = checkpointer.save(1, {"policy": trained}, {})
    expected = [step(trained) for _ in range(2)]
    for prepare in (lambda: None, lambda: step(other), other.meta):
        prepare()
        checkpointer.load(path, {"policy": other})
        assert [step(other) for _ in range(2)] == expected and same(weights(other), weights(trained))


def test_moves_take_the_optimiser_along(engine):
    """ENG-20."""
    step(engine)
    assert engine.cpu().cpu("weights").cpu("optimizer").device.type == "cpu"
    state = module_of(engine).optimizer.state
    engine.to("meta", "optimizer")
    assert all(value.is_meta for entry in state.values() for value in entry.values() if value.dim())
    with pytest.raises(ValueError, match="the optimiser's state was freed: load a checkpoint first"):
        engine.cpu("optimizer")
    with pytest.raises(ValueError, match="the optimiser's state was freed: load a checkpoint first"):
        in_charge_of(module_of(engine)).checkpoint_state()


def test_an_optimiser_that_is_not_there_is_refused_by_name_alone():
    engine = built(own.Line)
    engine.cpu()
    with pytest.raises(ValueError, match="Line has no 'optimizer' to move; it has weights"):
        engine.cpu("optimizer")


class Partly(ParallelModule):
    """A backbone with weights of its own, a head and buffers without."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
        self.register_buffer("loaded", torch.randn(2))
        self.register_buffer("scale", torch.randn(2), persistent=False)

    def load_weights(self):
        self.backbone.to_empty(device="cpu")
        self.loaded = torch.full((2,), 5.0)
        for parameter in self.backbone.parameters():
            torch.nn.init.constant_(parameter, 7.0)

    def forward(self, x):
        return self.head(self.backbone(x))


def test_what_load_weights_filled_stays():
    """ENG-3: parameters and buffers."""
    engine = built(Partly)
    torch.manual_seed(0)
    expected, found = Partly(), module_of(engine)
    assert all(bool((p == 7).all()) for p in found.backbone.parameters()) and bool((found.loaded == 5).all())
    assert same(found.head.state_dict(), expected.head.state_dict()) and torch.equal(found.scale, expected.scale)


def test_a_plain_module_loads_its_own_weights_if_that_needs_no_argument():
    class Loads(torch.nn.Linear):
        def load_weights(self):
            self.weight = torch.nn.Parameter(torch.full((2, 3), 7.0))

    class IsGiven(torch.nn.Linear):
        def load_weights(self, weights):
            raise AssertionError

    assert bool((module_of(built(lambda: Loads(3, 2))).weight == 7).all())
    torch.manual_seed(0)
    assert torch.equal(module_of(built(lambda: IsGiven(3, 2))).weight, torch.nn.Linear(3, 2).weight)


# Every optimiser of torch, with what makes its state differ from zeros.
OPTIMIZERS = {
    "ASGD": {},
    "Adadelta": {},
    "Adafactor": {"lr": 0.1},
    "Adagrad": {"initial_accumulator_value": 0.5},
    "Adam": {"amsgrad": True},
    "AdamW": {"lr": torch.tensor(1e-2)},
    "Adamax": {},
    "Muon": {"lr": 0.1},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "dampening": 0.5, "lr": 0.1},
}
REFUSED = {"LBFGS", "SparseAdam"}


class Many(ParallelModule):
    """Optimisers and schedules in a list, a dictionary and a sub-module; some parameters never get a gradient."""

    def __init__(self, kind, options):
        super().__init__()
        self.kind, self.options = kind, options
        self.first, self.second = (torch.nn.Linear(3, 3, bias=False) for _ in range(2))
        self.unused = torch.nn.Linear(3, 3, bias=False)

    def on_weights_materialized(self):
        make = getattr(torch.optim, self.kind)
        used = [self.first.weight, self.unused.weight]
        self.optimizers = [make(used, **self.options)]
        self.second._own = {"optimizer": make([self.second.weight], **self.options)}
        self.schedules = {
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizers[0], patience=0),
            "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(self.second._own["optimizer"], T_max=5),
        }

    def step(self):
        inputs = torch.linspace(-1, 1, 12).view(4, 3)
        loss = self.second(self.first(inputs).tanh()).square().sum()
        loss.backward()
        for optimizer in (*self.optimizers, *self.second._own.values()):
            optimizer.step()
            optimizer.zero_grad()
        self.schedules["plateau"].step(float(loss.detach()))
        self.schedules["cosine"].step()
        return float(loss.detach())


def test_no_optimiser_of_torch_is_left_out():
    kinds = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)} - {"Optimizer"}
    assert kinds == OPTIMIZERS.keys() | REFUSED


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_of_every_optimiser_comes_back_whole(kind, steps, tmp_path):
    """ENG-10, as a law: state after load = state before, and the next steps are equal bit for bit."""
    trained, other = (built(lambda: Many(kind, OPTIMIZERS[kind]), seed=seed) for seed in (0, 1))
    for _ in range(steps):
        trained.step()
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    path = checkpointer.save(1, {"policy": trained}, {})
    before = copy.deepcopy(trained.checkpoint_state())
    expected = [trained.step() for _ in range(3)]
    for _ in range(2):  # into new ones, then into ones that have a state
        checkpointer.load(path, {"policy": other})
        assert str(other.checkpoint_state()) == str(before)
        assert [other.step() for _ in range(3)] == expected and same(weights(other), weights(trained))
    empty = TrainEngine(lambda: Many(kind, OPTIMIZERS[kind])).build()
    empty.load_checkpoint_state(before)
    assert [empty.step() for _ in range(3)] == expected


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_an_optimiser_whose_state_cannot_come_back_is_refused_when_it_is_saved(kind, tmp_path):
    class Linear(ParallelModule, torch.nn.Linear):
        def on_weights_materialized(self):
            self.optimizer = getattr(torch.optim, kind)([self.weight])

    with pytest.raises(NotImplementedError, match=f"cannot hold the state of {kind}, whose update needs"):
        Checkpointer(tmp_path).save(1, {"policy": built(lambda: Linear(3, 2))}, {})


def test_a_checkpoint_of_other_optimisers_is_refused(tmp_path):
    class Linear(ParallelModule, torch.nn.Linear):
        def __init__(self, **optimizers):
            super().__init__(3, 2)
            self.made = optimizers

        def on_weights_materialized(self):
            for name, kind in self.made.items():
                setattr(self, name, kind([self.weight], lr=0.1))

    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    path = checkpointer.save(1, {"policy": built(lambda: Linear(optimizer=torch.optim.SGD))}, {})
    with pytest.raises(ValueError, match=r"another optimiser than AdamW, which has no \['dampening', 'momentum'"):
        checkpointer.load(path, {"policy": built(lambda: Linear(optimizer=torch.optim.AdamW))})
    with pytest.raises(ValueError, match=r"Linear has the optimizers \['other'\], the checkpoint has \['optimizer'\]"):
        checkpointer.load(path, {"policy": built(lambda: Linear(other=torch.optim.SGD))})
    foreign = built(lambda: Linear())
    module_of(foreign).optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="the optimiser has 1 parameters that Linear does not have"):
        checkpointer.save(2, {"policy": foreign}, {})


class Odd(ParallelModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 2)

    def weight(self):
        return {"weight": self.line.weight, "also": [self.line.weight.T], "tokens": torch.ones(2)}

    def inside(self):
        return {"model": self.line}

    def history(self):
        return self.line(torch.ones(2))


def test_a_result_is_not_the_memory_of_the_module():
    """ENG-22: what was returned does not change with the next step; the caller's own tensors stay as they are."""
    engine = built(Odd)
    result = engine.weight()
    kept = copy.deepcopy(result)
    with torch.no_grad():
        module_of(engine).line.weight.add_(1)
    assert str(result) == str(kept) and not result["weight"].requires_grad
    assert engine.history().grad_fn is None
    state = engine.state_dict()
    assert type(state) is type(module_of(engine).state_dict()) and state["line.bias"] is not None


def test_results_that_only_the_worker_can_hold():
    """ENG-21: ``eval`` is the engine itself; other modules, and what goes through them, are refused by name."""
    engine = built(Odd)
    assert engine.eval() is engine and not module_of(engine).training
    assert engine.train() is engine and engine.requires_grad_(False) is engine
    with pytest.raises(TypeError, match=r"Odd\.inside returns Linear, which stays in its worker: return values"):
        engine.inside()
    with pytest.raises(TypeError, match=r"Odd\.parameters returns generator, which stays in its worker"):
        engine.parameters()


@pytest.mark.parametrize("name", ["run", "call", "build", "release", "sync_weights"])
def test_a_method_that_the_engine_would_hide_is_refused_by_name(name):
    """ENG-21."""
    kind = type("Mine", (torch.nn.Linear,), {name: lambda self: 1})
    with pytest.raises(ValueError, match=f"Mine has methods that TrainEngine would hide.*: {name}. Give them"):
        TrainEngine(lambda: kind(2, 2)).build()
    engine = TrainEngine(own.Line).build()
    assert [engine.name] == [n for n in engine.executor.held[0] if n == engine.name]


class Cuts(ParallelModule):
    cuts_sequences = True
    takes_empty_shares = True

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    @returns("sum")
    def total(self, rows):
        return float(rows.sum())

    def nothing(self, rows):
        pass


@pytest.mark.parametrize("factory", [own.Line, *own.FACTORIES.values()])
def test_a_sequence_axis_is_refused_unless_the_module_cuts_sequences(factory):
    """ENG-2: before any group is made, by every worker."""
    many = ManyHosts(2)
    with pytest.raises(ValueError, match="does not say that it cuts sequences: each of the 2 sequence ranks"):
        TrainEngine(factory, executor=many).build(mesh=Mesh(sequence=2))
    assert not many.held and not any(host.workers for host in many.hosts)


class Adds:
    """A worker that is no torch module."""

    total, nothing = Cuts.total, Cuts.nothing


@pytest.mark.parametrize("tensor", [1, 2, 3])
@pytest.mark.parametrize("sequence", [1, 2])
def test_a_sum_counts_every_token_once(sequence, tensor):
    """ENG-9; a method without result is none (ENG-22)."""
    layout = Mesh(shard=2, sequence=sequence, tensor=tensor)
    engine = Engine(Adds, executor=ManyHosts(layout.size)).build(mesh=layout)
    rows = torch.arange(24.0).view(3, 8)
    assert engine.total(NeedParallel(rows, over="sequence")) == float(rows.sum())
    assert engine.nothing(NeedParallel(rows, over="sequence")) is None


@pytest.mark.parametrize("over", ["data", "sequence"])
def test_ranks_with_the_same_arguments_get_one_object(over):
    """What a transport encodes, it encodes once for all ranks that get it."""
    many, layout = ManyHosts(8), Mesh(shard=2, sequence=2, tensor=2)
    engine = Engine(Adds, executor=many).build(mesh=layout)
    engine.total(NeedParallel(torch.ones(4, 4), over=over))
    sent = many.sent[-1][1]
    assert len({id(given) for given in sent.values()}) == (2 if over == "data" else 4)
    for one in range(8):
        for other in range(8):
            apart = layout.data_rank(one) != layout.data_rank(other)
            apart |= over == "sequence" and layout.place(one).sequence != layout.place(other).sequence
            assert (sent[one] is sent[other]) is not apart


def test_a_mark_inside_an_argument_is_cut_too():
    """ENG-22: in dictionaries, lists and tuples; what holds none is the caller's own object."""

    class Looks:
        @returns("local")
        def look(self, batch, plain, *, named):
            return batch["x"].tolist(), [pair[1] for pair in batch["pairs"]], plain, named[0].tolist()

    engine = Engine(Looks, executor=ManyHosts(2)).build(mesh=Mesh(shard=2))
    rows, plain = torch.arange(4), [1, {"a": 2}]
    batch = {"x": NeedParallel(rows), "pairs": [("y", NeedParallel([5, 6, 7, 8])), ("z", 3)]}
    found = engine.look(batch, plain, named=(NeedParallel(rows + 10),))
    assert [f[:2] + f[3:] for f in found] == [([0, 1], [[5, 6], 3], [10, 11]), ([2, 3], [[7, 8], 3], [12, 13])]
    assert all(f[2] is plain for f in found) and isinstance(batch["x"], NeedParallel)


class Standing(torch.nn.Module):
    """A plain module, which cannot say that it takes an empty share."""

    total = Cuts.total


class Unready(Cuts):
    takes_empty_shares = False


@pytest.mark.parametrize("factory", [Standing, Unready])
def test_a_call_that_leaves_a_worker_without_rows_is_refused_before_anything_is_sent(factory, monkeypatch):
    """ENG-13."""
    monkeypatch.setattr("rl_bridge.engines.worker.fill", lambda *_: None)
    monkeypatch.setattr("rl_bridge.parallel.mesh.make_mesh", lambda *_: None)
    many = ManyHosts(3)
    engine = TrainEngine(factory, executor=many).build(mesh=Mesh(shard=3))
    many.sent.clear()
    for rows in (0, 2):
        with pytest.raises(
            ValueError, match=rf"total: {rows} rows for 3 shares .*, and {factory.__name__} does not say"
        ):
            engine.total(NeedParallel(torch.ones(rows, 2)))
    assert not many.sent and engine.total(NeedParallel(torch.ones(3, 2))) == 6
    ready = TrainEngine(Cuts, executor=many).build(mesh=Mesh(shard=3))
    assert ready.total(NeedParallel(torch.ones(2, 2))) == 4


@pytest.mark.parametrize("mesh", [Mesh(tensor=2), Mesh(sequence=2), Mesh(replicate=2, tensor=2)])
def test_a_rollout_cannot_be_cut_over_workers(mesh):
    """ENG-8."""
    many = ManyHosts(4)
    with pytest.raises(ValueError, match=r"2 copies that generate for the same prompts: .*Mesh\(replicate=N\)"):
        InferenceEngine(Adds, executor=many).build(mesh=mesh)
    assert not many.sent and InferenceEngine(Adds, executor=many).build(mesh=Mesh(replicate=2)).workers == 2


def test_engines_to_be_colocated_with_are_one_or_several():
    """ENG-21."""
    many = ManyHosts(2)
    first = Engine(Adds, executor=many).build()
    assert Engine(Adds, executor=many).build(colocate_with=first).slots == first.slots
    assert Engine(Adds, executor=many).build(colocate_with=(first,)).slots == first.slots
    assert Engine(Adds, executor=many).build(not_colocate_with=first).slots != first.slots


def test_a_call_that_is_on_its_way_cannot_be_cancelled():
    """ENG-22: ``cancel`` says so, and the result comes."""
    from concurrent.futures import Future

    class Waits(ManyHosts):
        def submit(self, function, arguments, *, what, timeout=None, together=None):
            self.pending = Future(), function, arguments, what
            return self.pending[0]

    many = Waits(1)
    engine = Engine(Adds, executor=many).build()
    future = engine.submit("total", torch.ones(2))
    assert not future.cancel()
    pending, function, arguments, what = many.pending
    pending.set_result(many.call(function, arguments, what=what))
    assert future.result() == 2


@pytest.mark.parametrize("when", ["before", "in the call"])
def test_an_engine_with_a_dead_slot_is_released(when):
    """ENG-22: the slots are free, and the workers that live are gone."""
    from rl_bridge.executors.executor import WorkerDied

    class Mortal(ManyHosts):
        noticed = True

        def __init__(self, slots):
            super().__init__(slots)
            self.died = {}

        def dead(self):
            return self.died if self.noticed else {}

        def call(self, function, arguments, *, what, timeout=None, together=None):
            alive = {slot: given for slot, given in arguments.items() if slot not in self.died}
            found = super().call(function, alive, what=what, timeout=timeout)
            if len(alive) < len(arguments):
                self.noticed = True
                raise WorkerDied("slot 1 is gone")
            return found

    many = Mortal(2)
    engine = Engine(Adds, executor=many).build(mesh=Mesh(shard=2))
    many.died, many.noticed = {1: WorkerDied("slot 1 is gone")}, when == "before"
    engine.release()
    assert many.held == {0: [], 1: []} and not many.hosts[0].workers and engine.slots == []


def test_a_sync_has_a_deadline_of_its_own(monkeypatch):
    """ENG-22."""
    seen = {}

    def sync(*_, timeout, **__):
        seen["timeout"] = timeout

    monkeypatch.setattr("rl_bridge.engines.train.sync_weights", sync)
    one, other = built(own.Line), built(own.Line)
    one.sync_weights(other, timeout=7.5)
    assert seen == {"timeout": 7.5}
    one.sync_weights(other)
    assert seen == {"timeout": 600.0}
