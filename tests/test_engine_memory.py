"""What an engine does with memory, and how it goes on after an error in the middle of a visit."""

import gc
import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import check_at_rest, check_engine, finish, joined, make_engine
from engines import quick_compilation as quick_compilation
from flax import nnx
from tiny import greedy, random_prompts, tiny_llama

from paged_jax.capacity import physical_memory
from paged_jax.engine import SamplingParams, prefix_index, scheduler
from paged_jax.engine.model_runner import ModelRunner
from paged_jax.engine.steps import EngineState, Form, create_rows, run

pytestmark = pytest.mark.usefixtures("quick_collection")

NEW = 20
PROMPTS = random_prompts(9, 33, 20, 33, seed=73)


def params(max_tokens: int = NEW, **settings) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **settings)


def num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def live_bytes() -> int:
    gc.collect()
    return num_bytes([array for array in jax.live_arrays() if not array.is_deleted()])


@pytest.mark.parametrize(
    "form", [Form(8, False, 0, 1), Form(4, True, 0, 4), Form(2, True, 0, 4), Form(12, False, 2, 4)], ids=str
)
def test_b72_the_pool_is_updated_in_place(form):
    """64 MiB of pages. Nothing of that size is copied, whether a row finds too few pages or not."""
    model = tiny_llama()
    state = jax.eval_shape(
        lambda: EngineState(create_rows(65536, 4, 4, 16, 16), model.create_pages(65536, 4, jnp.float32))
    )
    numbers = (jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32))
    lowered = run.lower(*nnx.split(model), state, *numbers, np.bool_(False), form=form, window=None)
    memory = lowered.compile().memory_analysis()
    pool = num_bytes(state.pages)
    assert pool == 2**26
    assert memory.alias_size_in_bytes >= num_bytes(state)
    assert memory.temp_size_in_bytes < 0.01 * pool


class _Error(RuntimeError):
    pass


class Failing:
    """Makes the calls of one method of every `ModelRunner` fail that `at` names, before or after its work."""

    def __init__(self, monkeypatch, method: str, at: set[int], before: bool, error=_Error):
        self.calls = self.raised = 0
        original = getattr(ModelRunner, method)

        def call(runner, *args, **kwargs):
            self.calls += 1
            fails = self.calls in at
            self.raised += fails
            if fails and before:
                raise error
            result = original(runner, *args, **kwargs)
            if fails:
                raise error
            return result

        monkeypatch.setattr(ModelRunner, method, call)


@contextmanager
def interrupted_at(number: int, *modules) -> Iterator[list[str]]:
    """Raises KeyboardInterrupt once, before the so manieth line that is run in these modules."""
    files, lines, interrupts = {module.__file__ for module in modules}, itertools.count(1), []

    def trace(frame, event, _):
        if event == "line" and next(lines) == number:
            interrupts.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: trace if frame.f_code.co_filename in files else None)
    try:
        yield interrupts
    finally:
        sys.settrace(before)


class TestErrors:
    """B73: whatever was submitted ends as if nothing had been, and no token is lost or comes twice."""

    @pytest.mark.parametrize("error", [_Error, KeyboardInterrupt])
    @pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
    @pytest.mark.parametrize("method", ["run", "admit", "update"])
    def test_b73_in_the_middle_of_a_visit(self, monkeypatch, method, before, error):
        engine = make_engine(draft_tokens=3)
        sampled = params(temperature=1.0, seed=1, n=3, logprobs=True)
        singles = [
            engine.generate([PROMPTS[0]], params(temperature=1.0, seed=seed))[0].token_ids
            for seed in (1, 2, 3)
        ]
        failing = Failing(monkeypatch, method, {1, 2, 4, 9}, before, error)
        engine.submit(PROMPTS[0], sampled, request_id="samples")
        for number, prompt in enumerate(PROMPTS[1:]):
            engine.submit(prompt, params(), request_id=str(number))
        deltas = {}
        for _ in range(200):
            if not engine.has_work:
                break
            try:
                news = engine.step()
            except (_Error, KeyboardInterrupt):
                news = []
            for delta in news:
                deltas.setdefault((delta.request_id, delta.index), []).append(delta)
            check_engine(engine)
        check_at_rest(engine)
        assert failing.raised == 4
        assert [joined(deltas["samples", index]) for index in range(3)] == singles
        assert all(sum(len(delta.logprobs) for delta in deltas["samples", i]) == NEW for i in range(3))
        for number, prompt in enumerate(PROMPTS[1:]):
            assert joined(deltas[str(number), 0]) == greedy(tiny_llama(), prompt, NEW)
        assert all(
            [delta.finish_reason for delta in each if delta.finish_reason] == ["length"]
            for each in deltas.values()
        )

    def test_b73_at_any_line_of_the_policy(self):
        """Ctrl-C while the host decides: at 60 of the lines that the scheduler and the prefix index run."""
        engine, rng = make_engine(), random.Random(73)
        expected = {str(n): greedy(tiny_llama(), prompt, NEW) for n, prompt in enumerate(PROMPTS)}
        for _ in range(60):
            for number, prompt in enumerate(PROMPTS):
                engine.submit(prompt, params(), request_id=str(number))
            deltas: dict = {}
            with interrupted_at(rng.randrange(1, 4000), scheduler, prefix_index) as interrupts:
                while engine.has_work:
                    try:
                        news = engine.step()
                    except KeyboardInterrupt:
                        continue
                    for delta in news:
                        deltas.setdefault(delta.request_id, []).append(delta)
            assert len(interrupts) <= 1
            check_at_rest(engine)
            assert {name: joined(each) for name, each in deltas.items()} == expected, interrupts
            assert all(each[-1].finish_reason == "length" for each in deltas.values())

    def test_b73_generate_takes_its_own_back_and_leaves_others(self, monkeypatch):
        engine = make_engine()
        engine.submit(PROMPTS[0], params(), request_id="other")
        deltas = engine.step()
        with monkeypatch.context() as patch:
            Failing(patch, "run", {2}, before=True)
            with pytest.raises(_Error):
                engine.generate(PROMPTS, params())
        check_engine(engine)
        assert engine.metrics.aborted == 4
        rest = finish(engine)
        assert joined([*deltas, *rest["other", 0]]) == greedy(tiny_llama(), PROMPTS[0], NEW)
        (output,) = engine.generate([PROMPTS[1]], params())
        assert output.token_ids == greedy(tiny_llama(), PROMPTS[1], NEW)

    def test_b73_while_a_request_is_taken_back(self, monkeypatch):
        engine = make_engine()
        for prompt in PROMPTS[:2]:
            engine.submit(prompt, params(), request_id=str(len(prompt)))
        deltas = engine.step()
        with monkeypatch.context() as patch:
            Failing(patch, "update", {1}, before=False)
            with pytest.raises(_Error):
                engine.abort("33")
        check_engine(engine)
        rest = finish(engine)
        assert [delta.finish_reason for delta in rest["33", 0]] == ["abort"]
        own = [delta for delta in deltas if delta.request_id == "9"]
        assert joined(own + rest["9", 0]) == greedy(tiny_llama(), PROMPTS[0], NEW)

    def test_b73_the_old_pool_goes_before_there_is_a_new_one(self, monkeypatch):
        """There may be memory for one only."""
        engine = make_engine()
        old = engine._core._runner.state.pages
        engine.submit(PROMPTS[0], params())
        Failing(monkeypatch, "run", {1}, before=True)
        original, live = ModelRunner._new_state, []

        def new_state(runner):
            live.append([not leaf.is_deleted() for leaf in jax.tree.leaves(old)])
            return original(runner)

        monkeypatch.setattr(ModelRunner, "_new_state", new_state)
        with pytest.raises(_Error):
            engine.step()
        assert live == [[False] * 4]
        finish(engine)


class TestSizes:
    """B75"""

    def test_b75_the_pool_stays_within_the_memory_asked_for(self):
        before = live_bytes()
        for memory, least in (("1MiB", 800), (2**20, 800), ("100KiB", 60)):
            engine = make_engine(num_pages=None, memory=memory)
            budget = 2**20 if memory == 2**20 else {"1MiB": 2**20, "100KiB": 100 * 2**10}[memory]
            page_bytes = 2 * 2 * 2 * 4 * 8 * 4  # layers, K and V, kv heads, page size, head size, float32
            assert least * page_bytes < num_bytes(engine._core._runner.state.pages) < budget
            assert engine.metrics.pages * page_bytes == num_bytes(engine._core._runner.state.pages)
            assert live_bytes() - before <= budget
            del engine

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (
                {"memory": str(10 * physical_memory())},
                "are wanted and the device .* has .*: take fewer pages",
            ),
            (
                {"num_pages": 10 * physical_memory() // 1024},
                "are wanted and the device .* has .*: take fewer",
            ),
            (
                {"memory": "4KiB"},
                "a budget of 4.* KiB leaves .* one row of 16 pages takes .* give more memory",
            ),
            ({"memory": "much"}, "much"),
            ({"memory": 0.5}, "does not report its memory: give the budget in bytes"),
            ({"memory": 1.5}, r"must be in \(0, 1\], got 1.5"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_b75_what_cannot_be_had_is_refused_before_it_is_tried(self, wrong, message):
        model = tiny_llama()
        before = live_bytes()
        with pytest.raises(ValueError, match=message):
            make_engine(model, **{"num_pages": None, **wrong})
        assert live_bytes() == before

    def test_b75_by_default_every_row_fits(self):
        assert make_engine(num_pages=None).metrics.pages == 4 * 16

    def test_b75_engines_come_and_go(self):
        tiny_llama()
        before = live_bytes()
        for _ in range(5):
            engine = make_engine()
            engine.generate(PROMPTS[:2], params(4))
            stream = engine.stream(PROMPTS[0], params())
            next(stream)
            del engine, stream
            assert live_bytes() == before
